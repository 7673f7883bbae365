"""The comparisons that a call must pass before a kernel computes it, each with the reason to report if it fails."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug_verify import Call, Watch, said_by

from ..contract import Target
from ..torch_private import GLOBAL_HOOKS
from .accepts import Accepts
from .gains import Gains, by_dtype
from .hooked import HOOKS, hooked_by, is_own, replaced_by
from .lookups import Route, at, equal_to, every, is_absent, looked_up, same_as
from .scoping import entered

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""The tensor types that kernels were run on. Their subclasses (FakeTensor, DTensor) bring operations of their own."""

is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]

OUTSIDE = "the call is outside the kernel's scope"
_SEE_RESULTS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_STORES = ("_modules", "_parameters", "_buffers")
_GONE = (AttributeError, LookupError, TypeError)

Test = Callable[[Sequence[Any]], Any]
"""``test(args)``, with the module first: whether a call is like the verified ones."""


class _Term(NamedTuple):
    """One comparison, and the reason to report if it fails, or a function that makes the reason from the arguments."""

    test: Test
    meaning: str | Callable[[Sequence[Any]], str]

    def why_not(self, args: Sequence[Any]) -> str:
        """The reason why the comparison fails for *args*; ``""`` if it holds."""
        try:
            if self.test(args):
                return ""
        except _GONE:
            pass
        try:
            return self.meaning if isinstance(self.meaning, str) else self.meaning(args)
        except _GONE:
            return "something that is compared is no longer there"


class Guard:
    """The comparisons for one way of calling.

    Args:
        call: The way of calling.
        original: The function that is called if a comparison fails.
        target: Where the original is found.
        device_type: The type of device on which the main input must be.
        accepts: Everything else that the guard compares.
    """

    def __init__(
        self, call: Call, original: Callable[..., Any], target: Target, device_type: str, accepts: Accepts
    ) -> None:
        main, watch = accepts.main, accepts.watch
        # Comparisons that look nothing up in the module come first, and the size as early as it can be read.
        first = [*_process(accepts), _Term(_is_plain(main), "the main input is not a plain tensor")]
        large = [*_size(main, accepts.gains)]
        self._of_module = [*_still(original, target, accepts), *_module(watch)]
        rest = [
            *_main_input(main, watch, device_type),
            *_arguments(call, main),
            _dtypes(original, accepts),
            *self._of_module,
            *_surroundings(watch, device_type),
        ]
        compiling = [_Term(lambda _: not torch.compiler.is_compiling(), "it is being compiled")]
        self._terms = [*(compiling if accepts.uncompiled else ()), *first, *large, *rest]
        self.holds = _all_hold(first, large, rest)

    def why_not(self, args: Sequence[Any]) -> str:
        """The reason that the first failing comparison gives; ``""`` if none fails."""
        return next((why for term in self._terms if (why := term.why_not(args))), "")

    def why_never(self, module: Any) -> str:
        """The reason that the first comparison gives that fails for *module* in every call; ``""`` if none does."""
        try:
            return next((why for term in self._of_module if (why := term.why_not([module]))), "")
        except Exception as error:  # noqa: BLE001 - reading a third party's module may raise anything
            return f"it cannot be compared with what it was: {said_by(error)}"


def _all_hold(*groups: Sequence[_Term]) -> Callable[[Sequence[Any]], bool | None]:
    first, large, rest = (tuple(term.test for term in terms) for terms in groups)

    def holds(args: Sequence[Any]) -> bool | None:
        """Whether all comparisons hold; ``None`` if the call is too small. Compilation is not tested here."""
        try:
            for test in first:
                if not test(args):
                    return False
            for test in large:
                if not test(args):
                    return None
            for test in rest:
                if not test(args):
                    return False
        except _GONE:
            return False
        return True

    return holds


def _is_plain(number: int) -> Test:
    # Nearly every tensor is a plain Tensor, and the first test takes a microsecond less than the second.
    # A nested tensor is a Tensor, too.
    return lambda args: (type(args[number]) is Tensor or type(args[number]) in PLAIN) and not args[number].is_nested


def _process(accepts: Accepts) -> Iterator[_Term]:
    if accepts.watch.untraced:
        yield _Term(lambda _: not is_tracing(), "it is being traced")
    if (scope := accepts.scope) is not None:
        yield _Term(lambda _: scope in entered(), OUTSIDE)


def _size(main: int, gains: Gains) -> Iterator[_Term]:
    if not gains:
        return
    training, inference = by_dtype(gains.training), by_dtype(gains.inference)
    largest = max(ends.least for ends in gains.training + gains.inference)

    def large(args: Sequence[Any]) -> bool:
        x: Tensor = args[main]
        number = x.numel()
        if number >= largest:
            return True
        ends = (training if x.requires_grad else inference).get(x.dtype)
        return ends is None or number >= ends.least or number <= ends.until

    yield _Term(large, lambda args: gains.why_not(args[main]))


def _main_input(main: int, watch: Watch, device_type: str) -> Iterator[_Term]:
    # Reading these properties takes a twentieth of a microsecond, reading the type of the device half a microsecond.
    on: dict[str, Test] = {"cpu": lambda args: args[main].is_cpu, "cuda": lambda args: args[main].is_cuda}
    elsewhere: Test = lambda args: args[main].device.type == device_type  # noqa: E731
    yield _Term(on.get(device_type, elsewhere), f"the main input is not on {device_type}")
    if watch.nonempty:
        yield _Term(lambda args: args[main].numel() != 0, "the main input is empty")
    if watch.contiguous:
        why = "an input is not contiguous"
        yield _Term(lambda args: all(x.is_contiguous() for x in args if isinstance(x, Tensor)), why)


def _arguments(call: Call, main: int) -> Iterator[_Term]:
    for number, (kinds, ranks) in enumerate(zip(call.kinds, call.ranks, strict=True)):
        which = f"argument {number}" if number < call.count else call.names[number - call.count]
        if kinds and number != main:
            yield _Term(_is_of(number, kinds), f"{which} is of a kind that was not tried")
        if ranks:
            sizes = " or ".join(map(str, sorted(ranks)))
            why = f"argument {number} was tried with {sizes} dimensions only"
            yield _Term(_has_one_of(number, ranks, {Tensor} >= kinds), why)
    if call.together:
        yield _Term(call.has, "each of its arguments was tried, but not all of them together")


def _is_of(number: int, kinds: frozenset[Any]) -> Test:
    types = (*(PLAIN if Tensor in kinds else ()), *(kind for kind in kinds if not isinstance(kind, tuple)))
    values = tuple(kind for kind in kinds if isinstance(kind, tuple))

    def is_of(args: Sequence[Any]) -> bool:
        value = args[number]
        return type(value) in types or any(type(value) is kind and value == expected for kind, expected in values)

    return is_of


def _has_one_of(number: int, ranks: frozenset[int], always: bool) -> Test:
    if always:
        return lambda args: args[number].ndim in ranks
    return lambda args: type(args[number]) not in PLAIN or args[number].ndim in ranks


def _dtypes(original: Callable[..., Any], accepts: Accepts) -> _Term:
    columns, rows = tuple(map(_dtype, accepts.typed)), tuple(accepts.dtypes)
    first, *others = columns
    firsts = tuple(row[0] for row in rows)

    def came(args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([dtype(args) for dtype in columns])

    test: Test = (lambda args: came(args) in rows) if others else (lambda args: first(args) in firsts)
    return _Term(test, functools.partial(_came_in, original, accepts, came))


def _dtype(where: int | str) -> Callable[[Sequence[Any]], Any]:
    if isinstance(where, int):
        return lambda args: getattr(args[where], "dtype", None)

    def dtype(args: Sequence[Any]) -> Any:
        """The dtype of the module's tensor. FSDP and replicas hold parameters as plain attributes."""
        tensor = args[0].__dict__["_parameters"].get(where)
        return getattr(getattr(args[0], where) if tensor is None else tensor, "dtype", None)

    return dtype


def _came_in(
    original: Callable[..., Any],
    accepts: Accepts,
    came: Callable[[Sequence[Any]], tuple[Any, ...]],
    args: Sequence[Any],
) -> str:
    """The reason that names the dtypes of a call, next to those of the nearest mix that was checked."""
    parameters, dtypes = [*inspect.signature(original).parameters], came(args)
    nearest = max(accepts.dtypes, key=lambda row: sum(map(operator.is_, row, dtypes)))
    names = [parameters[where] if isinstance(where, int) else where for where in accepts.typed]
    unlike, alike = [], []
    for name, dtype, checked in zip(names, dtypes, nearest, strict=True):
        if dtype is checked:
            alike.append(f"{name} in {dtype}")
        else:
            unlike.append(f"{name} in {dtype} (checked: {checked})")
    beside = f", beside {' and '.join(alike)}" if alike else ""
    text = f"it has a dtype in which the kernel was not checked here: {' and '.join(unlike)}{beside}"
    return text.replace("torch.", "")


def original_now(original: Callable[..., Any], target: Target, accepts: Accepts) -> Test:
    """A function that looks up the original for a call, because somebody may have put another function in its place."""
    method = target.method
    if target.function is None:
        return lambda args: getattr(type(args[0]), method)
    if accepts.space is None:
        return lambda _: original
    look = looked_up(accepts.space.value, target.function)
    return lambda _: look()


def _still(original: Callable[..., Any], target: Target, accepts: Accepts) -> Iterator[_Term]:
    if target.function is None or accepts.space is not None:
        method, same, now = target.method, same_as(original), original_now(original, target, accepts)
        of_class: Test = lambda args: same(getattr(type(args[0]), method))  # noqa: E731 - spares the call of now()
        test: Test = of_class if target.function is None else lambda args: same(now(args))
        yield _Term(test, f"{target} is no longer the one that was replaced")


def _module(watch: Watch) -> Iterator[_Term]:
    for term in watch.terms:
        route, value, meaning = term.route, term.value, f"no longer as it was: {term.described()}"
        if term.kind == "bare":
            *above, (name, _) = route
            if name != "*":
                # An attribute of the instance itself, or of its class, shadows a child of the same name.
                why = f"there is something else in the place of {name}"
                yield _Term(_each(tuple(above), functools.partial(_lacks, name, "object")), why)
            yield _Term(_each(route, _is_bare(value.value)), _hooked(meaning, route))
        elif term.kind == "method":
            yield _Term(_each(route, _has_method(term.name, value.value)), meaning)
        elif term.space is not None:
            space = term.space.value
            yield _Term(is_absent(space, term.name) if value.absent else _means(space, term.name, value), meaning)
        elif value.absent:
            yield _Term(_each(route[:-1], functools.partial(_lacks, *route[-1])), meaning)
        else:
            yield _Term(_each(route, equal_to(value)), meaning)


def _each(route: Route, test: Callable[[Any], Any]) -> Test:
    """*test* of what is at *route* below the module, or of every item if the route leads through a list."""
    if any(step.name == "*" for step in route):
        return lambda args: all(test(item) for item in every(args[0], route))
    return lambda args: test(at(args[0], route))


def _means(space: Any, name: Any, value: Any) -> Test:
    look, test = looked_up(space, name), equal_to(value)
    return lambda _: test(look())


def _lacks(name: str, store: str | int, owner: Any) -> bool:
    state, registries = owner.__dict__, () if store == "object" else _STORES
    return not (hasattr(type(owner), name) or name in state or any(name in state[stored] for stored in registries))


def _is_bare(cls: Any) -> Callable[[Any], bool]:
    forward, call = getattr(cls, "forward", None), cls.__call__

    def is_bare(child: Any) -> bool:
        if type(child) is not cls or cls.forward is not forward or cls.__call__ is not call:
            return False
        state = child.__dict__
        return ("forward" not in state or is_own(state["forward"], child, forward)) and not any(state[h] for h in HOOKS)

    return is_bare


def _has_method(name: str, function: Any) -> Callable[[Any], bool]:
    same = same_as(function)

    def has_method(owner: Any) -> bool:
        state = owner.__dict__
        return same(getattr(type(owner), name)) and (name not in state or is_own(state[name], owner, function))

    return has_method


def _hooked(meaning: str, route: Route) -> Callable[[Sequence[Any]], str]:
    """A function that returns *meaning* with the origin of the hooks or the forward that are at *route* instead."""

    def with_whose(args: Sequence[Any]) -> str:
        whose, forward = hooked_by(args[0], route), replaced_by(args[0], route)
        hooks = f" (there are some of {whose})" if whose else ""
        return meaning + hooks + (f" (its forward is {forward})" if forward else "")

    return with_whose


def _surroundings(watch: Watch, device_type: str) -> Iterator[_Term]:
    if watch.no_grad:
        yield _Term(lambda _: not torch.is_grad_enabled(), "gradients are on, and it was checked without them")
    if any(term.kind == "bare" for term in watch.terms):
        yield _Term(lambda _: not any(GLOBAL_HOOKS), "all modules have hooks, which a fused child would not call")
    if watch.unhooked:
        yield _Term(_unhooked, "there are hooks that see its result")
    if watch.no_autocast:
        yield _Term(lambda _: not torch.is_autocast_enabled(device_type), "autocast is on")


def _unhooked(args: Sequence[Any]) -> bool:
    state = args[0].__dict__
    return not (any(state[name] for name in _SEE_RESULTS) or any(GLOBAL_HOOKS))
