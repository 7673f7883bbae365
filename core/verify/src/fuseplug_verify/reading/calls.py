"""What a call runs, returns and changes."""

# ruff: noqa: D102 - an on_ method says in its name what it is for
from __future__ import annotations

import ast
import functools
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .arguments import Arguments, Partial
from .attributes import item_of, kind_of
from .expressions import Expressions, Local
from .found import MISSING
from .known import BUILTINS
from .libraries import is_library, is_readable, only_computes, wrapped_by
from .library import call_library, is_log
from .lookup import in_class, is_a
from .reaching import is_wrapped
from .settled import SCALARS, answer_of, is_filled
from .values import NEVER, NOTHING, Value, either, kinds_of, known, listed


class Calls(Expressions):
    """Expressions, with calls."""

    def on_call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and "super" not in self.env:
            return self._super(node)
        called = self.value(node.func)
        given = self._given(node)
        return either(self._call(node, each, given) for each in called.each)

    def _given(self, node: ast.Call) -> Arguments:
        values: list[Value] = []
        rest: Value | None = None
        for each in node.args:
            found = self.value(each)
            if not isinstance(each, ast.Starred):
                values.append(found if found.others is None else self._without_names(found))
            elif found.items is not None and found.exact and rest is None:
                values += found.items
            else:
                item = item_of(self.reader, found, None)
                rest = item if rest is None else either((rest, item))
        named: dict[str, Value] = {}
        others: Value | None = None
        for keyword in node.keywords:
            found = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = found if found.others is None else self._without_names(found)
            elif found.named is not None:
                named |= found.named
                others = found.others if others is None else either((others, *filter(None, [found.others])))
            else:
                item = item_of(self.reader, found, Value())
                others = item if others is None else either((others, item))
        return Arguments(tuple(values), rest, named, others)

    def call(self, node: Any, called: Value, given: Arguments) -> Value:
        """Follow a call of *called*."""
        return either(self._call(node, each, given) for each in called.each)

    def _call(self, node: Any, f: Value, given: Arguments) -> Value:
        thing = f.object
        if f is NEVER or f.name == "never":
            return NEVER
        if isinstance(f.local, Local):
            return self.call_local(f.local, given)
        if isinstance(f.local, Partial):
            return self.call(node, f.local.called, f.local.with_more(given))
        if f.made is not None:
            return self._made(node, f, given)
        if (builtin := BUILTINS.get(id(thing))) is not None:
            return builtin(self, node, given)
        if thing is MISSING or is_a(thing, torch.Tensor) or thing is None:
            return self._unknown(node, f, given)
        return self._object(node, f, thing, given)

    def _object(self, node: Any, f: Value, thing: Any, given: Arguments) -> Value:
        """A call of the very object *thing*."""
        if (cls := _applied_by(f, thing)) is not None:
            return self._differentiated(cls, given)
        if is_a(thing, types.MethodType):
            return self._method(node, f, thing, given)
        if is_a(thing, functools.partial):
            first = Arguments(tuple(map(_outside, thing.args)), named=_outsides(thing.keywords))
            return self._call(node, _outside(thing.func), Partial(f, first).with_more(given))
        if is_a(thing, nn.Module):
            return self._module(f, given)
        if is_a(thing, type):
            return self._made_of(node, thing, given)
        if is_a(thing, types.FunctionType):
            return self._function(node, f, thing, given)
        return self._other(node, f, thing, given)

    def _method(self, node: Any, f: Value, method: types.MethodType, given: Arguments) -> Value:
        bound = f if f.receiver is None else f.receiver
        itself = bound if bound.object is method.__self__ else known(method.__self__, owned=False)
        if itself.object is getattr(self.env.get("self"), "object", MISSING):
            itself = self.env["self"]
        return self._call(node, Value(object=method.__func__, owned=False, receiver=itself, name=f.name), given)

    def _module(self, f: Value, given: Arguments) -> Value:
        found = self.reader.module(f, given)
        if found.items is not None or not found.owned:
            return found
        kinds = kinds_of(given.all) & {"value", "param"} | {"value"}
        return Value(kinds) if not is_a(f.object, nn.Identity | nn.Flatten) else given.at(0) or Value(kinds)

    def _function(self, node: Any, f: Value, function: types.FunctionType, given: Arguments) -> Value:
        bound = given if f.receiver is None else given.after(f.receiver)
        if is_readable(function) or is_wrapped(wrapped_by(function)):
            return self.reader.function(function, bound)
        name = function.__name__
        owner: Any = f.receiver.object if f.receiver is not None else MISSING
        calls = name in ("__call__", "_call_impl", "_wrapped_call_impl")
        if calls and f.receiver is not None and is_a(owner, nn.Module):
            return self._call(node, f.receiver, given)
        # The ``get`` that ``Mapping`` gives a class of a model calls the class's own ``__getitem__``.
        if name == "get" and f.receiver is not None and is_readable(in_class(type(owner), "__getitem__")):
            at, default = given.at(0) or NOTHING, given.at(1, "default") or known(None)
            return either((item_of(self.reader, f.receiver, at), default))
        return call_library(self, node, f, function, given)

    def _differentiated(self, cls: type, given: Arguments) -> Value:
        found = []
        for name in ("forward", "backward", "setup_context"):
            function = in_class(cls, name)
            function = function.__func__ if is_a(function, staticmethod) else function
            if is_a(function, types.FunctionType) and is_wrapped(function):
                context = () if "setup_context" in vars(cls) and name == "forward" else (NOTHING,)
                unknown = Arguments(context, rest=Value(frozenset({"value"})))
                found.append(self.reader.function(function, given.after(*context) if name == "forward" else unknown))
        return found[0] if found else NOTHING

    def _made_of(self, node: Any, cls: type, given: Arguments) -> Value:
        """An instance of *cls*."""
        if issubclass(cls, BaseException):
            return NOTHING
        if cls in (list, tuple, set, frozenset):
            return self._collected(given.at(0))
        if cls is dict:
            return self._dict(given)
        if cls in (int, float, bool, str, complex, range, slice, bytes):
            self.asked(node, *given.values)
            return Value(kinds_of(given.all))
        if is_library(cls):
            return call_library(self, node, Value(object=cls, owned=False), cls, given)
        return self._constructed(node, cls, given)

    def _collected(self, source: Value | None) -> Value:
        """A list, tuple or set of what is in *source*."""
        if source is None:
            return listed(())
        if source.items:
            return replace(source, owned=True, given=False, _key=[])
        return listed((item_of(self.reader, source, None),), exact=False)

    def _dict(self, given: Arguments) -> Value:
        if not given.values and given.others is None:
            return Value(kinds_of(given.all), items=tuple(given.named.values()), exact=False, named=dict(given.named))
        items = [item_of(self.reader, each, NOTHING) for each in given.values]
        return listed([*items, *given.named.values()], exact=False)

    def _constructed(self, node: Any, cls: type, given: Arguments) -> Value:
        """An instance of a class of a model: its constructors are read."""
        made = Value(kinds_of(given.all), made=cls, fields={})
        for name in ("__new__", "__init__", "__post_init__"):
            function = in_class(cls, name)
            function = function.__func__ if is_a(function, staticmethod) else function
            if not is_a(function, types.FunctionType) or _is_generated(function):
                continue
            if is_readable(function):
                first = known(cls, owned=False) if name == "__new__" else made
                self.reader.function(function, given.after(first) if name != "__post_init__" else Arguments((first,)))
        metaclass = in_class(type(cls), "__call__")
        if is_readable(metaclass):
            self.unread(node, "its metaclass makes the instance")
        return made

    def _made(self, node: Any, f: Value, given: Arguments) -> Value:
        cls: Any = f.made
        name = "forward" if issubclass(cls, nn.Module) else "__call__"
        function = in_class(cls, name)
        if is_readable(function):
            return self.reader.function(function, given.after(f))
        if not is_library(cls):
            self.unread(node, f"a {cls.__name__} cannot be called by reading")
        return Value(kinds_of([f, *given.all]))

    def _unknown(self, node: Any, f: Value, given: Arguments) -> Value:
        if f.receiver is not None:
            return call_library(self, node, f, MISSING, given)
        if f.object is None:
            return NEVER
        self.unread(node, "an argument is called" if f.given else "what is called is not known")
        self.escapes(node, given)
        return Value(kinds_of(given.all))

    def _other(self, node: Any, f: Value, thing: Any, given: Arguments) -> Value:
        """A call of something that is neither a function of Python nor a module nor a class."""
        if is_a(thing, functools._lru_cache_wrapper):
            inner: Any = thing.__wrapped__
            if is_log(f.receiver, thing, f.name):
                return known(None)
            # Without arguments a filled cache answers and nothing runs. Only ``cache_clear`` could change the answer.
            if not given.all and f.receiver is None and thing.cache_info().currsize:
                found = thing()
                if is_filled(thing) and type(found) in SCALARS:
                    self.reader.looked(answer := answer_of(thing), answer.name, found)
                return known(found, *kind_of(found), owned=False)
            return self._function(node, replace(f, object=inner, _key=[]), inner, given)
        function = in_class(type(thing), "__call__")
        if function is MISSING:
            return NEVER
        if not is_a(thing, types.BuiltinFunctionType) and is_readable(function):
            return self.reader.function(function, given.after(f))
        return call_library(self, node, f, thing, given)

    def _super(self, node: ast.Call) -> Value:
        """What ``super()`` is, with arguments or without."""
        given = [self.value(each) for each in node.args]
        if len(given) == 2:
            itself, cls = given[1], given[0].object
        else:
            code = self.function.__code__
            itself = self.env.get(code.co_varnames[0], NOTHING) if code.co_argcount else NOTHING
            cls = self.name("__class__").object if "__class__" in code.co_freevars else MISSING
        if not isinstance(cls, type) or not (itself.known or itself.made):
            self.unread(node, "which class super() looks in is not known")
            return NOTHING
        return Value(after=cls, receiver=itself, owned=itself.owned)

    def escapes(self, node: Any, given: Arguments) -> None:
        """Note what is handed to code that is not read; functions among it are read."""
        for each in _flattened(given.all):
            if isinstance(each.local, Local):
                if not each.local.called:
                    self.call_local(each.local, Arguments(rest=_ARGUMENT, others=_ARGUMENT))
                continue
            if isinstance(each.local, Partial):
                self.call(node, each, Arguments(rest=_ARGUMENT, others=_ARGUMENT))
                continue
            thing = each.object
            function = thing.__func__ if is_a(thing, types.MethodType) else thing
            if is_a(function, types.FunctionType) and is_wrapped(function):
                more = Arguments(rest=_ARGUMENT, others=_ARGUMENT)
                self.call(node, each, more)
            elif is_a(thing, nn.Module) and not each.owned:
                self.unread(node, f"a {type(thing).__name__} is handed to what is not read")
            elif not each.owned and each.known and _has_state(thing):
                what = ".".join(each.path) if each.path else f"a {type(thing).__name__}"
                self.unread(node, f"{what} is handed to what is not read")

    def grown(self, target: Any, before: Value, added: Value) -> None:
        """Add a thing to a container that was made in the call."""
        if isinstance(target, ast.Name) and before.items is not None:
            self.env[target.id] = self._without_names(before, added)

    def _without_names(self, before: Value, added: Value = NOTHING) -> Value:
        """*before* after something was put into it; whatever else is the same dict of arguments, too."""
        items = (either((*(before.items or ()), added)),)
        after = replace(before, kinds=before.kinds | added.kinds, items=items, exact=False, named=None, _key=[])
        if before.others is not None:
            self.env.update((name, after) for name, value in self.env.items() if value.key == before.key)
        return after

    def call_local(self, local: Local, given: Arguments) -> Value:
        """Follow a call of a function that is defined in the code."""
        raise NotImplementedError


_ARGUMENT = Value(frozenset({"value"}), owned=False, given=True)


def _outside(thing: Any) -> Value:
    return known(thing, owned=False)


def _outsides(things: dict[str, Any]) -> dict[str, Value]:
    return {name: _outside(thing) for name, thing in things.items()}


_CALLABLE = types.FunctionType | types.ClassMethodDescriptorType | types.BuiltinMethodType


def _applied_by(f: Value, thing: Any) -> type[torch.autograd.Function] | None:
    """The class whose ``apply`` of torch's is called: written in Python, and from torch 2.15 on in C."""
    if not is_a(thing, _CALLABLE) or thing.__name__ != "apply" or is_readable(thing):
        return None
    owner: Any = thing.__self__ if is_a(thing, types.BuiltinMethodType) else getattr(f.receiver, "object", MISSING)
    return owner if is_a(owner, type) and issubclass(owner, torch.autograd.Function) else None


def _is_generated(function: types.FunctionType) -> bool:
    """Whether ``dataclass`` or ``namedtuple`` wrote it: then it only stores its arguments."""
    return function.__code__.co_filename == "<string>" or function.__globals__.get("__name__", "").startswith(
        "namedtuple_"
    )


def _has_state(thing: Any) -> bool:
    return not isinstance(
        thing, torch.Tensor | int | float | str | tuple | type | types.ModuleType | None.__class__
    ) and (not only_computes(thing) or is_a(thing, list | dict | set))


def _flattened(values: list[Value]) -> Iterator[Value]:
    for value in values:
        for each in value.each:
            yield each
            yield from _flattened(list(each.items or ()))
