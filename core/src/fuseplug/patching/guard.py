"""The guard of a call: one Python function that compares everything watched, and the reason if it says no."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug_verify import Call, Watch, said_by

from ..accepts import Accepts
from ..contract import Target
from ..gains import Gains, by_dtype
from ..torch_private import GLOBAL_HOOKS, get_tracing_state
from .hooked import HOOKS, hooked_by, is_own, replaced_by
from .scoping import entered

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Types that kernels were run on. What is derived from them (a FakeTensor, a DTensor) brings operations of its own."""

OUTSIDE = "it is called outside the calls for which the kernel was made"
_SEE_RESULTS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_TYPES = {"cpu": "is_cpu", "cuda": "is_cuda"}
"""Properties that say in a twentieth of a microsecond what ``device.type`` says in half of one."""

Holds = Callable[[Sequence[Any]], "bool | None"]
"""``holds(args)``, the module first: whether a call is as it was verified; ``None`` if its main input is too small."""

_STORES = ("_modules", "_parameters", "_buffers")
"""Dictionaries in a module's own, each a local variable of the guard: looking one up costs as much as a comparison."""

_HOLDS = """\
def holds(a):
    try:
        {}
        m = a[0]
        {}
        return {}
    except GONE:
        return False
"""

# As names alone: they may also be attributes, keys, or parts of names of functions.
_USED = r"(?<![\w.'\"]){}\b"
_OF_MODULE = re.compile(_USED.format(f"(?:m|d|{'|'.join(_STORES)})"))


class _Term(NamedTuple):
    """One comparison, and the reason.

    Attributes:
        code: An expression in ``a``, the arguments; ``m``, the first of them; and, if that is a module, ``d``, its
            dictionary, and those in it that `_STORES` names.
        meaning: What is said where it is false; or makes that of the arguments.
        answer: What `Holds` returns then.
    """

    code: str
    meaning: str | Callable[[Sequence[Any]], str]
    answer: bool | None = False

    def why(self, args: Sequence[Any]) -> str:
        """What is said of a call with *args*."""
        return self.meaning if isinstance(self.meaning, str) else self.meaning(args)


class Guard:
    """The comparisons of one way of calling.

    Args:
        call: How it is called.
        original: What is called where one of them fails.
        target: Where that is found.
        device_type: Where the main input must be.
        accepts: Everything else that is compared.

    Attributes:
        holds: Whether all comparisons hold. That nothing is compiled is not asked there: whoever calls it knows.
        names: What the names in its expressions stand for.
    """

    def __init__(
        self, call: Call, original: Callable[..., Any], target: Target, device_type: str, accepts: Accepts
    ) -> None:
        self.names: dict[str, Any] = {"read": object.__getattribute__, "T": Tensor, "P": PLAIN, "is_own": is_own}
        main, watch = accepts.main, accepts.watch
        compiling = [*self._compiling(accepts)]
        self._before_size = [*self._tracing(accepts), *self._scope(accepts), *self._plain(main)]
        self._of_size = [*self._size(main, accepts.gains)]
        of_call = [
            *self._before_size,
            *self._of_size,
            *self._device(main, device_type),
            *self._dtypes(original, accepts),
            *self._arguments(call, main),
        ]
        self._now = self._place(original, target, accepts)
        known = target.function is None or accepts.space is not None
        self._of_module = [*(self._still(original, target) if known else ()), *self._module(watch)]
        terms = [*of_call, *self._of_module, *self._surroundings(watch, main, device_type)]
        self._terms = [*compiling, *terms]
        self.holds: Holds = self._compiled(terms)

    def why_not(self, args: Sequence[Any]) -> str:
        """The reason of the first comparison that fails; ``""`` if none fails."""
        return next((term.why(args) for term in self._terms if not self._compiled([term])(args)), "")

    def why_never(self, module: Any) -> str:
        """The reason of the first comparison that fails for *module* in every call; ``""`` if none does."""
        try:
            return next((term.why([module]) for term in self._of_module if not self._compiled([term])([module])), "")
        except Exception as error:  # noqa: BLE001 - what a third party's module says of itself may raise anything
            return f"it cannot be compared with what it was: {said_by(error)}"

    def now(self, module: str) -> str:
        """The expression for what is in the place of the original now, where *module* is that for the module."""
        return self._now.format(module)

    def too_small(self) -> str | None:
        """The expression in ``a``, the arguments, for whether a call is too small; ``None`` if none is."""
        if not self._of_size:
            return None
        return _all_of([*(term.code for term in self._before_size), *(f"not {term.code}" for term in self._of_size)])

    def _compiled(self, terms: Sequence[_Term]) -> Holds:
        # What asks nothing of the module is compared before anything is looked up there.
        first = [*itertools.takewhile(lambda term: not _OF_MODULE.search(term.code), terms)]
        rest = _all_of([term.code for term in terms[len(first) :]])
        lines = [
            f"if not ({_all_of([term.code for term in group])}): return {answer}"
            for answer, group in itertools.groupby(first, lambda term: term.answer)
        ]
        used = [f"{store} = d['{store}']" for store in _STORES if re.search(_USED.format(store), rest)]
        needed = used or re.search(_USED.format("d"), rest)
        locals_ = "; ".join(["d = m.__dict__", *used] if needed else ["pass"])
        names = {**self.names, "GONE": (AttributeError, KeyError, IndexError, TypeError)}
        code = _HOLDS.format("\n        ".join(lines or ["pass"]), locals_, rest)
        exec(compile(code, "<guard of a fused kernel>", "exec"), names)  # noqa: S102 - made from data, values by name
        holds: Holds = names["holds"]
        return holds

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def _compiling(self, accepts: Accepts) -> Iterator[_Term]:
        if accepts.uncompiled:
            yield _Term(f"not {self._constant(torch.compiler.is_compiling)}()", "it is being compiled")

    def _tracing(self, accepts: Accepts) -> Iterator[_Term]:
        if accepts.watch.untraced:
            yield _Term(f"{self._constant(get_tracing_state)}() is None", "it is being traced")

    def _scope(self, accepts: Accepts) -> Iterator[_Term]:
        if accepts.scope is not None:
            inside = f"{self._constant(accepts.scope)} in {self._constant(entered)}()"
            yield _Term(inside, OUTSIDE)

    def _plain(self, main: int) -> Iterator[_Term]:
        yield _Term(_is_plain(f"a[{main}]"), "the main input is no plain tensor")

    def _size(self, main: int, gains: Gains) -> Iterator[_Term]:
        """First of all that is asked of a plain tensor: what is too small is not to wait for the other comparisons."""
        if not gains:
            return
        x = f"a[{main}]"
        ends = [*gains.training, *gains.inference]
        least = self._by_gradients(x, gains, "least")
        code = f"(n := {x}.numel()) >= {least}"
        if not least.isdecimal():
            # Most calls are smaller or larger than every number, and need not be asked which is theirs.
            smallest, largest = (f(each.least for each in ends) for f in (min, max))
            code = f"(n := {x}.numel()) >= {largest} or n >= {smallest} and n >= {least}"
        if highest := max(each.until for each in ends):
            most = self._by_gradients(x, gains, "until")
            code += f" or n <= {highest} and n <= {most}"
        code = f"({code})"
        yield _Term(code, lambda args: gains.why_not(args[main]), answer=None)

    def _by_gradients(self, x: str, gains: Gains, end: Literal["least", "until"]) -> str:
        """The expression for the number that belongs to *x*."""
        training, inference = ([getattr(each, end) for each in kind] for kind in (gains.training, gains.inference))
        with_, without = self._number(x, training), self._number(x, inference)
        return with_ if training == inference else f"({with_} if {x}.requires_grad else {without})"

    def _device(self, main: int, device_type: str) -> Iterator[_Term]:
        x = f"a[{main}]"
        on = f"{x}.{_OWN_TYPES[device_type]}" if device_type in _OWN_TYPES else f"{x}.device.type == {device_type!r}"
        yield _Term(on, f"the main input is not on {device_type}")

    def _number(self, x: str, numbers: Sequence[int]) -> str:
        """The expression for the one of *numbers* that belongs to the dtype of *x*."""
        if len(set(numbers)) == 1:
            return str(numbers[0])
        return f"{self._constant(by_dtype(numbers))}.get({x}.dtype, 0)"

    def _place(self, original: Callable[..., Any], target: Target, accepts: Accepts) -> str:
        """The expression for the original, where it is looked up, with a place for the module."""
        if target.function is None:
            return f"type({{}}).{target.method}"
        if accepts.space is None:
            return self._constant(original)
        return self._named(accepts.space.held, str(target.function))

    def _still(self, original: Callable[..., Any], target: Target) -> Iterator[_Term]:
        code = self._is_function(self.now("m"), original)
        yield _Term(code, f"{target} is no longer the one that was replaced")

    def _dtypes(self, original: Callable[..., Any], accepts: Accepts) -> Iterator[_Term]:
        dtypes = accepts.dtypes
        tensors = [f"a[{each}]" if isinstance(each, int) else _tensor(each) for each in accepts.typed]
        if len(tensors) == 1:
            code = f"{tensors[0]}.dtype in {self._constant(tuple(row[0] for row in dtypes))}"
        else:
            columns = zip(tensors, zip(*dtypes, strict=True), strict=True)
            pair = ", ".join(f"getattr({x}, 'dtype', None)" if None in seen else f"{x}.dtype" for x, seen in columns)
            code = f"({pair}) in {self._constant(tuple(dtypes))}"
        yield _Term(code, functools.partial(_came_in, accepts, list(inspect.signature(original).parameters)))

    def _arguments(self, call: Call, main: int) -> Iterator[_Term]:
        for number, kinds in enumerate(call.kinds):
            which = f"argument {number}" if number < call.count else call.names[number - call.count]
            if number != main and (code := self._is_of(f"a[{number}]", kinds)):
                yield _Term(code, f"{which} is something that was not tried")
        for number, ranks in enumerate(call.ranks):
            if ranks:
                sizes = " or ".join(map(str, sorted(ranks)))
                code = is_one_of(f"a[{number}].ndim", sorted(ranks))
                if any(kind is not Tensor for kind in call.kinds[number]):
                    code = f"(not {_is_plain(f'a[{number}]')} or {code})"
                yield _Term(code, f"argument {number} has not {sizes} dimensions, with which it was tried")

    def _is_of(self, argument: str, kinds: frozenset[Any]) -> str:
        parts = [_is_plain(argument)] if Tensor in kinds else []
        values = [kind[1] for kind in kinds if isinstance(kind, tuple)]
        parts += [f"{argument} is {value!r}" for value in values if value is None or isinstance(value, bool)]
        if rest := tuple(value for value in values if value is not None and not isinstance(value, bool)):
            parts.append(f"{argument} in {self._constant(rest)}")
        if types := tuple(kind for kind in kinds if isinstance(kind, type) and kind is not Tensor):
            parts.append(f"type({argument}) in {self._constant(types)}")
        return f"({' or '.join(parts)})" if len(parts) > 1 else "".join(parts)

    def _module(self, watch: Watch) -> Iterator[_Term]:
        meanings = iter(watch.described())
        for route, cls in watch.bare:
            hooks = " or ".join(f"o[{name!r}]" for name in HOOKS)
            held, forward = self._constant(cls), self._constant(getattr(cls, "forward", None))
            own = f"('forward' not in (o := c.__dict__) or is_own(o['forward'], c, {forward})) and not ({hooks})"
            call = self._constant(cls.__call__)
            test = f"type(c := {{}}) is {held} and {held}.forward is {forward} and {held}.__call__ is {call} and {own}"
            if route[-1].name != "*":
                # What the instance itself holds under the child's name comes before the child.
                above = _each(route[:-1], f"{route[-1].name!r} not in {{}}.__dict__")
                yield _Term(above, f"there is something else in the place of {route[-1].name}")
            yield _Term(_each(route, test), _hooked(next(meanings), route))
        for route, value in watch.equal:
            yield _Term(_each(route, self._equals(value)), _unlike(next(meanings)))
        for route, one in watch.same:
            yield _Term(_each(route, f"{{}} is {self._constant(one.held)}"), _unlike(next(meanings)))
        for (route,) in watch.missing:
            yield _Term(_lacks(route), _unlike(next(meanings)))
        for route, name, function in watch.methods:
            same = self._is_function(f"type(c).{name}", function.held)
            unbound = f"{name!r} not in (o := c.__dict__) or is_own(o[{name!r}], c, {self._constant(function.held)})"
            test = f"(c := {{}}) is not None and {same} and ({unbound})"
            yield _Term(_each(route, test), _unlike(next(meanings)))
        for space, name, looked in watch.spaces:
            test = self._equals(looked) if looked.by_value else self._is_function("{}", looked.held)
            there = self._is_not_in(space.held, name) if looked.absent else test.format(self._named(space.held, name))
            yield _Term(there, _unlike(next(meanings)))

    def _named(self, space: Any, name: Any) -> str:
        """The expression for what *name* means in *space*."""
        if isinstance(space, types.CellType):
            return f"{self._constant(space)}.cell_contents"
        if (module := module_of(space, name)) is not None:
            return f"{self._constant(module)}.{name}"
        names, key = self._constant(space), self._constant(name)
        if isinstance(space, dict) and type(space) is not dict:
            # A registry of a model's own may make something new of what it holds.
            return f"dict.__getitem__({names}, {key})"
        return f"{names}[{key}]"

    def _is_not_in(self, space: Any, name: Any) -> str:
        if (module := module_of(space, name)) is not None:
            return f"not {self._constant(hasattr)}({self._constant(module)}, {name!r})"
        names, key = self._constant(space), self._constant(name)
        if isinstance(space, dict) and type(space) is not dict:
            return f"not dict.__contains__({names}, {key})"
        return f"{key} not in {names}"

    def _is_function(self, found: str, value: Any) -> str:
        """Test that *found* is *value*; of a function also its code and defaults, which reloading replaces."""
        known = self._constant(value)
        same = [f"{found} is {known}"]
        if isinstance(value, types.FunctionType):
            same.append(f"{known}.__code__ is {self._constant(value.__code__)}")
            same += [
                f"{known}.{name} is {self._constant(getattr(value, name))}"
                for name in ("__defaults__", "__kwdefaults__")
                if getattr(value, name) is not None
            ]
        return " and ".join(same)

    def _equals(self, value: Any) -> str:
        if value.value is None or value.kind is bool:
            return f"{{}} is {value.value!r}"
        return f"{{}} == {self._constant(value.held)}"

    def _surroundings(self, watch: Watch, main: int, device_type: str) -> Iterator[_Term]:
        if watch.nonempty:
            yield _Term(f"a[{main}].numel() != 0", "the main input is empty")
        if watch.contiguous:
            yield _Term(f"a[{main}].is_contiguous()", "the main input is not contiguous")
        if watch.no_grad:
            yield _Term(
                f"not {self._constant(torch.is_grad_enabled)}()",
                'gradients are on, and it was planned with mode="inference"',
            )
        everybodys = " or ".join(self._constant(each) for each in GLOBAL_HOOKS)
        if watch.bare:
            yield _Term(f"not ({everybodys})", "there are hooks on all modules, which a fused child would not call")
        if watch.unhooked:
            own = " or ".join(f"d[{name!r}]" for name in _SEE_RESULTS)
            yield _Term(f"not ({own} or {everybodys})", "there are hooks that see its result")
        if watch.no_autocast:
            yield _Term(f"not {self._constant(torch.is_autocast_enabled)}({device_type!r})", "autocast is on")


def _came_in(accepts: Accepts, parameters: Sequence[str], args: Sequence[Any]) -> str:
    """Which dtypes a call came with, beside those of the checked mix that is nearest."""
    paths = [each if isinstance(each, int) else ".".join(step.name for step in each) for each in accepts.typed]
    tensors = [args[each] if isinstance(each, int) else operator.attrgetter(each)(args[0]) for each in paths]
    came = [getattr(tensor, "dtype", None) for tensor in tensors]
    nearest = max(accepts.dtypes, key=lambda row: sum(map(operator.is_, row, came)))
    names = [parameters[each] if isinstance(each, int) else each for each in paths]
    rows = [
        (f"{name} in {dtype}" + ("" if dtype is known else f" (checked: {known})"), dtype is known)
        for name, dtype, known in zip(names, came, nearest, strict=True)
    ]
    unlike, alike = ([text for text, same in rows if same is wanted] for wanted in (False, True))
    beside = f", beside {' and '.join(alike)}" if alike else ""
    text = f"it has a dtype in which the kernel was not checked here: {' and '.join(unlike)}{beside}"
    return text.replace("torch.", "")


def _all_of(codes: Sequence[str]) -> str:
    return " and ".join(codes) or "True"


def is_one_of(number: str, values: Sequence[int]) -> str:
    """The expression for whether *number*, an expression, is one of *values*: cheaper where there is one."""
    return f"{number} == {values[0]}" if len(values) == 1 else f"{number} in {tuple(values)}"


def _is_plain(argument: str) -> str:
    # Nearly every tensor is of the first type, and that question costs a microsecond less than the other.
    return f"(type({argument}) is T or type({argument}) in P)"


def module_of(space: Any, name: Any) -> types.ModuleType | None:
    """The Python module whose names *space* holds, if *name* can be read as an attribute of it.

    ``torch.compile`` reads an attribute alone, and of a dictionary every name. While it does so, the garbage collector
    may remove what it wrote there for an earlier program, and then it raises.
    """
    if type(space) is not dict or "__getattr__" in space or not (isinstance(name, str) and name.isidentifier()):
        return None
    module = sys.modules.get(str(space.get("__name__")))
    return module if type(module) is types.ModuleType and vars(module) is space else None


def _unlike(expected: str) -> str:
    return f"no longer as it was: {expected}"


def _hooked(expected: str, route: Sequence[Any]) -> Callable[[Sequence[Any]], str]:
    """As `_unlike`, and whose hooks or forward there are instead."""

    def meaning(args: Sequence[Any]) -> str:
        whose, forward = hooked_by(args[0], route), replaced_by(args[0], route)
        return (
            _unlike(expected)
            + (f" (there are some of {whose})" if whose else "")
            + (f" (its forward is {forward})" if forward else "")
        )

    return meaning


def _each(route: Sequence[Any], test: str) -> str:
    """*test*, with a place for what it is about, of what is at *route*; of every item, where that leads into a list."""
    before = list(itertools.takewhile(lambda step: step.name != "*", route))
    if len(before) == len(route):
        return f"({test.format(_path('m', route))})" if ":=" in test else test.format(_path("m", route))
    count, rest = route[len(before)].store, route[len(before) + 1 :]
    items = _store(_path("m", before), "_modules")
    return f"len({items}) == {count} and all([{test.format(_path('e', rest))} for e in {items}.values()])"


def _store(owner: str, store: str) -> str:
    """The expression for one of the dictionaries of the module *owner*."""
    return store if owner == "m" else f"{owner}.{store}"


def _path(root: str, route: Sequence[Any]) -> str:
    """The expression for what is at *route* below *root*, by way of no ``__getattr__``."""
    for name, store in route:
        if store == "plain":
            root = f"{root}.{name}"
        elif store == "object":
            root = f"read({root}, {name!r})"
        else:
            root = f"{_store(root, store)}[{name!r}]"
    return root


def _tensor(route: Sequence[Any]) -> str:
    """The expression for the tensor at *route*. FSDP and replicas hold as an attribute what was a parameter."""
    owner, (name, store) = _path("m", route[:-1]), route[-1]
    if store not in ("_parameters", "_buffers"):
        return _path("m", route)
    return f"(t if (t := {_store(owner, store)}.get({name!r})) is not None else {owner}.{name})"


def _lacks(route: Sequence[Any]) -> str:
    above, (name, store) = route[:-1], route[-1]
    if store == "object":
        return _each(above, f"{name!r} not in {{}}.__dict__")
    if not above:
        return " and ".join(f"{name!r} not in {names}" for names in ("d", *_STORES))
    stores = " and ".join(f"{name!r} not in o['{each}']" for each in _STORES)
    return _each(above, f"{name!r} not in (o := {{}}.__dict__) and {stores}")
