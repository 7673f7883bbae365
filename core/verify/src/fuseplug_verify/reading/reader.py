"""Reads one function and everything that it reaches."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from .arguments import Arguments, bind, parameters
from .attributes import attribute_of
from .decorators import context_kinds
from .found import Finding, Held, Looked, Path, Reading
from .libraries import home, is_readable, wrapped_by
from .lookup import in_class, is_a
from .reaching import is_wrapped
from .source import all_codes, tree_of
from .statements import Walk
from .values import NEVER, NOTHING, Value, either, kinds_of, known

Call: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments."""

_DEEPEST = 40
_TEXT = str | None.__class__
_MOST = 4000
"""How many calls are followed: a transformer of many kinds of layers takes some hundred."""


def read(function: types.FunctionType, module: nn.Module | None = None, calls: Sequence[Call] = ()) -> Reading:
    """Read what *function* depends on, including everything that it calls except torch and Python.

    Args:
        function: A function; or, with *module*, a method of it, whose first parameter is the module.
        module: The module whose method it is. Its present state is read, and nothing is run.
        calls: Positional and keyword arguments, without the module. If there are any, an argument that is a string or
            ``None`` in all of them is taken to be one of these: the key of an activation, for example. Others may have
            any value.
    """
    reader = Reader()
    given = list(parameters(function))
    itself = None
    if module is not None and not isinstance(in_class(type(module), function.__name__), staticmethod):
        itself = Value(path=(), object=module, owned=False)
    defaults = _defaults(function)
    values = {name: _argument(kind, defaults.get(name)) for name, kind in given}
    values |= _told(function, calls, itself)
    if itself is not None and given and given[0][1] == "positional":
        values[given[0][0]] = itself
    elif itself is not None and given and given[0][1] == "*" and not calls:
        values[given[0][0]] = Value(frozenset({"value"}), given=True, owned=False, items=(itself,), exact=False)
    reader.root(function, values, itself)
    reader.finish(function, given[itself is not None :])
    return reader.found


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    while (inner := wrapped_by(function)) is not None:
        function = inner
    names = [name for name, kind in parameters(function) if kind == "positional"]
    plain = function.__defaults__ or ()
    return dict(zip(names[len(names) - len(plain) :], plain, strict=True)) | (function.__kwdefaults__ or {})


def _told(function: types.FunctionType, calls: Sequence[Call], itself: Value | None) -> dict[str, Value]:
    """The parameters of *function* of which *calls* tell more than that they are arguments."""
    if len({(len(args), *sorted(named)) for args, named in calls}) != 1:
        return {}
    values = [_one_of(things) for things in zip(*(args for args, _ in calls), strict=True)]
    # What is not given is its default: further keyword arguments have other names than the parameters.
    named = {name: _one_of([default]) for name, default in _last_defaults(function, len(values) + bool(itself))}
    named |= {name: _one_of([more[name] for _, more in calls]) for name in calls[0][1]}
    bound = bind(function, Arguments((*filter(None, [itself]), *values), named=named, others=_one_of(())))
    several = {name for name, kind in parameters(function) if kind in ("*", "**")}
    return {name: v for name, v in bound.items() if name in several or all(is_a(e.object, _TEXT) for e in v.each)}


def _last_defaults(function: types.FunctionType, skipped: int) -> Iterator[tuple[str, Any]]:
    """The names of the parameters after the first that have strings or ``None`` as defaults, decorated ones' too."""
    for each in list(inspect.signature(function).parameters.values())[skipped:]:
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and is_a(each.default, _TEXT):
            yield each.name, each.default


def _one_of(things: Sequence[Any]) -> Value:
    if things and all(is_a(thing, _TEXT) for thing in things):
        return either(Value(frozenset({"option"}), object=thing, owned=False, given=True) for thing in things)
    return Value(frozenset({"value"}), owned=False, given=True)


def _argument(kind: str, default: Any) -> Value:
    if kind in ("*", "**"):
        item = Value(frozenset({"value"}), owned=False, given=True)
        return Value(frozenset({"value"}), items=(item,), exact=False)
    option = is_a(default, bool | int | float | str)
    if callable(default):
        return either((Value(frozenset({"value"}), owned=False, given=True), known(default, owned=False)))
    return Value(frozenset({"option" if option else "value"}), owned=False, given=True)


class Reader:
    """Walks through functions, and collects what they read, call and change."""

    def __init__(self) -> None:
        self.found = Reading()
        self.inside: Path = ()
        self._stack: list[tuple[types.CodeType, Any]] = []
        self.walking: list[Any] = []
        self._results: dict[Any, tuple[Value, Any]] = {}
        self._seen: set[Any] = set()
        self._calls = 0
        self._package = ""

    def root(self, function: types.FunctionType, values: dict[str, Value], itself: Value | None) -> None:
        """Read the requested function, and the functions that it wraps and holds, even if no call of them is found."""
        self._package = _package(function)
        waiting: list[types.FunctionType] = [function]
        for each in waiting:  # grows on the way
            if each.__code__ in self.found.codes:
                continue
            if is_readable(each):
                self._walk(
                    each,
                    {n: values.get(n, _argument(k, None)) for n, k in parameters(each)} | self._first(each, itself),
                )
            elif each is function and wrapped_by(each) is None:
                self.unread(function, f"{each.__module__}.{each.__qualname__}", None)
            self.decorated(each)
            waiting += [f for f in (wrapped_by(each), *(held.value for held in self.found.cells)) if is_wrapped(f)]

    def _first(self, function: types.FunctionType, itself: Value | None) -> dict[str, Value]:
        name, kind = next(iter(parameters(function)), ("", ""))
        return {name: itself} if itself is not None and kind == "positional" else {}

    def finish(self, function: types.FunctionType, given: Sequence[tuple[str, str]]) -> None:
        """Add up what was read."""
        for path in self.found.calls:
            self.found.methods.pop((path, "forward"), None)
        codes = dict.fromkeys(code for read in self.found.codes for code in all_codes(read))
        self.found.codes = list(codes)
        self.found.numbers = {float(n) for code in codes for n in _numbers(code.co_consts)}
        if (tree := tree_of(function)) is not None:
            used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            self.found.ignored = frozenset(name for name, _ in given if name not in used)

    # What is found

    def note(self, store: list[Finding], text: str, kinds: Any, code: Any, span: Any, source: str = "") -> None:
        """Keep a finding, once."""
        finding = Finding(text, self.inside, frozenset(kinds), code, span, source)
        if (id(store), finding) not in self._seen:
            self._seen.add((id(store), finding))
            store.append(finding)

    def named(self, function: types.FunctionType) -> str:
        """*function*, for a person: with its Python module, if it is of another package than what is read."""
        name = function.__qualname__
        return name if _package(function) == self._package else f"{home(function)}.{name}"

    def unread(self, _: Any, text: str, code: Any) -> None:
        """Keep what could not be read."""
        self.note(self.found.unknown, text, (), code, None)

    def looked(self, space: Mapping[str, Any], name: str, value: Any, owner: Any = None) -> None:
        """Keep a name that was looked up outside the module."""
        if (key := ("looked", id(space if owner is None else owner), name, self.inside)) not in self._seen:
            self._seen.add(key)
            self.found.globals.append(Looked(space, name, value, self.inside))

    def held(self, cell: types.CellType, name: str, value: Any) -> None:
        """Keep a cell that was read."""
        if (key := ("cell", id(cell), self.inside)) not in self._seen:
            self._seen.add(key)
            self.found.cells.append(Held(cell, name, value, self.inside))

    # What is followed

    def function(self, function: types.FunctionType, given: Arguments) -> Value:
        """Follow a call of *function*, and return what it returns."""
        self.decorated(function)
        if not is_readable(function):
            inner = wrapped_by(function)
            return NOTHING if inner is None else self.function(inner, given)
        key = (function.__code__, id(function), self.inside, given.key)
        if key in self._results:
            return self._results[key][0]
        self._calls += 1
        again = any(code is function.__code__ for code, _ in self._stack)
        if again:
            return Value(kinds_of(given.all))
        if len(self._stack) >= _DEEPEST or self._calls > _MOST:
            self.unread(function, f"{function.__qualname__}: there are too many calls to follow", None)
            return Value(kinds_of(given.all))
        result = self._walk(function, bind(function, given))
        self._results[key] = (result, (function, given))  # kept alive: the key has their ids
        inner = wrapped_by(function)
        if inner is not None and inner.__code__ not in self.found.codes:
            self.function(inner, given)
        return result

    def decorated(self, function: types.FunctionType) -> None:
        """Note what a decorator of torch does around what it wraps."""
        if kinds := context_kinds(function):
            inner = wrapped_by(function) or function
            text = f"a decorator of {inner.__qualname__} (line {inner.__code__.co_firstlineno})"
            self.note(self.found.contexts, text, kinds, inner.__code__, None)

    def _walk(self, function: types.FunctionType, env: dict[str, Value]) -> Value:
        tree = tree_of(function)
        if tree is None:
            where = f"{function.__module__}.{function.__qualname__}"
            self.unread(function, f"{where}: there is no source that compiles to its code", function.__code__)
            return Value(kinds_of(env.values()))
        if function.__code__ not in self.found.codes:
            self.found.codes.append(function.__code__)
        self._stack.append((function.__code__, None))
        try:
            walk = Walk(self, function, env)
            return walk.run(tree)
        finally:
            self._stack.pop()

    def module(self, value: Value, given: Arguments) -> Value:
        """Follow a call of a module."""
        module, path = value.object, value.path
        before = self.inside
        if path is not None:
            self.found.calls.setdefault(path, module)
            self.found.reads.setdefault(path, module)  # an item of a list is named nowhere else
            self.inside = path
        try:
            return self._forward(value, module, given)
        finally:
            self.inside = before

    def _forward(self, value: Value, module: nn.Module, given: Arguments) -> Value:
        name = "__call__" if in_class(type(module), "__call__") is not nn.Module.__call__ else "forward"
        results = []
        if value.path is None and not value.owned:
            self.unread(module, f"a {type(module).__name__} is called that is not below the module", None)
        for each in attribute_of(self, value, name, None).each:
            method = each.object
            function = method.__func__ if is_a(method, types.MethodType) else method
            bound = each.receiver
            if is_a(method, types.MethodType):
                bound = value if method.__self__ is module else Value(object=method.__self__, owned=False)
            if is_a(function, types.FunctionType) and (is_readable(function) or is_wrapped(wrapped_by(function))):
                results.append(self.function(function, given.after(bound) if bound else given))
            else:
                self.unread(
                    module, f"{type(module).__module__}.{type(module).__qualname__}.{name} cannot be read", None
                )
                results.append(Value(frozenset({"value"})))
        return either(results) if results else NEVER


def _package(function: types.FunctionType) -> str:
    return home(function).partition(".")[0]


def _numbers(constants: Any) -> Iterator[float]:
    for constant in constants:
        if isinstance(constant, tuple | frozenset):
            yield from _numbers(constant)
        elif isinstance(constant, int | float) and not isinstance(constant, bool) and abs(constant) < 1e300:
            yield constant
