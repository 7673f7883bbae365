"""Copies the attributes of modules, so that copies and originals share nothing that can change."""

from __future__ import annotations

import copyreg
import enum
import functools
import numbers
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..safe_access import class_name, said_by
from ..torch_private import OpOverload, OpOverloadPacket

_SHARED: frozenset[type] = frozenset(
    {
        type(None),
        type(Ellipsis),
        type(NotImplemented),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        slice,
        type,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        torch.memory_format,
        torch.finfo,
        torch.iinfo,
        re.Pattern,
        types.ModuleType,
        types.FunctionType,
        types.CodeType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.ClassMethodDescriptorType,
        type(functools.lru_cache(lambda: None)),
        torch.jit.ScriptFunction,
        OpOverload,
        OpOverloadPacket,
    }
)
"""What cannot change, or is code."""

_ALSO_SHARED = (enum.Enum, type, types.ModuleType)
"""The same with all that is derived from them."""

_MOST_OBJECTS = 10_000
"""What leads to more objects than this does not belong to one module: it is a way to the rest of a program."""


class UncopyableError(Exception):
    """Something that can neither be copied nor be shared."""


class Uncopied:
    """Stands where a copy was impossible; whatever is done to it raises, saying so.

    The forward that needs it is thus refused with a reason, and all others run.
    """

    def __init__(self, name: str, value: object, why: str) -> None:
        object.__setattr__(self, "_cls", type(value))
        object.__setattr__(
            self,
            "_why",
            f"its attribute {name}, a {class_name(value)}, cannot be copied, and planning runs copies only ({why}): "
            "make it copyable, or leave the module out with skip=",
        )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return object.__getattribute__(self, "_cls")

    def __deepcopy__(self, memo: object) -> Uncopied:
        return self

    def __repr__(self) -> str:
        return f"<not copied: {object.__getattribute__(self, '_why')}>"

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__deepcopy__", "__dict__", "__repr__"):
            return object.__getattribute__(self, name)
        raise TypeError(object.__getattribute__(self, "_why"))


def _refuse(self: Uncopied, *_args: Any, **_kwargs: Any) -> Any:
    raise TypeError(object.__getattribute__(self, "_why"))


_OPERATIONS = (
    *("call", "setattr", "delattr", "bool", "len", "iter", "next", "reversed", "contains", "getitem", "setitem"),
    *("delitem", "enter", "exit", "aenter", "aexit", "await", "eq", "ne", "lt", "le", "gt", "ge", "hash", "str"),
    *("format", "int", "float", "complex", "index", "abs", "neg", "add", "radd", "iadd", "sub", "rsub", "isub", "mul"),
    *("rmul", "imul", "truediv", "rtruediv", "floordiv", "mod", "pow", "matmul", "rmatmul", "and", "or", "xor"),
)
# Python looks these up on the class, where __getattribute__ is not asked.
for _operation in _OPERATIONS:
    setattr(Uncopied, f"__{_operation}__", _refuse)


class Copying:
    """Copies values deeply, each once: what was the same object is the same object in the copy.

    Args:
        tensor: Makes the copy of a tensor.
        module: Makes the copy of a module that *memo* does not have.
        memo: Copies by the ``id`` of what they are copies of, as `copy.deepcopy` keeps them; the caller keeps the
            originals alive.
    """

    def __init__(
        self, tensor: Callable[[Tensor], Tensor], module: Callable[[nn.Module], nn.Module], memo: dict[int, Any]
    ) -> None:
        self._tensor = tensor
        self._module = module
        self._memo = memo
        self._left = _MOST_OBJECTS
        # Or the id of a passing object could become that of another one.
        self._alive: list[Any] = []

    def attribute(self, name: str, value: Any) -> Any:
        """The copy of what is called *name*; an `Uncopied` if there can be none."""
        if type(value) in _SHARED:
            return value
        self._left, before = _MOST_OBJECTS, len(self._memo)
        try:
            return self.copy(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a third party's __deepcopy__ may raise anything
            # Objects half made are in there.
            while len(self._memo) > before:
                self._memo.popitem()
            return Uncopied(name, value, str(error) if type(error) is UncopyableError else said_by(error))

    def copy(self, value: Any) -> Any:
        """The copy of *value*.

        Raises:
            UncopyableError: If there can be none.
            Exception: Whatever its class raises when it is copied.
        """
        kind = type(value)
        if kind in _SHARED:
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        self._left -= 1
        if self._left < 0:
            raise UncopyableError(f"it leads to more than {_MOST_OBJECTS} objects")
        self._alive.append(value)
        made = self._copy(kind, value)
        self._memo[id(value)] = made
        return made

    def _copy(self, kind: type, value: Any) -> Any:  # noqa: C901 - one kind of value after the other
        if issubclass(kind, _ALSO_SHARED) or kind is Uncopied or _is_number(kind):
            return value
        if kind is dict:
            made: Any = {}
            if _SHARED.issuperset(map(type, value)) and _SHARED.issuperset(map(type, value.values())):
                return value.copy()
            self._memo[id(value)] = made
            made.update((self.copy(key), self.copy(item)) for key, item in value.items())
            return made
        if kind in (list, tuple, set, frozenset) and _SHARED.issuperset(map(type, value)):
            return value if kind in (tuple, frozenset) else value.copy()
        if kind is list:
            made = []
            self._memo[id(value)] = made
            made.extend(self.copy(item) for item in value)
            return made
        if kind in (tuple, set, frozenset):
            return kind(self.copy(item) for item in value)
        if issubclass(kind, Tensor):
            return self._tensor(value)
        if issubclass(kind, nn.Module):
            return self._module(value)
        if (special := _SPECIAL.get(kind)) is not None:
            return special(self, value)
        if (own := getattr(kind, "__deepcopy__", None)) is not None:
            return self._another(own(value, self._memo), value)
        return self._rebuilt(value)

    def _rebuilt(self, value: Any) -> Any:
        """What `copy.deepcopy` makes of an object that has no ``__deepcopy__``."""
        reduce = copyreg.dispatch_table.get(type(value))
        kind: Any = type(value)
        reduced = kind.__reduce_ex__(value, 4) if reduce is None else reduce(value)
        if isinstance(reduced, str):  # the name of a global
            return value
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        made = self._another(function(*map(self.copy, arguments)), value)
        self._memo[id(value)] = made
        if state is not None:
            self._set_state(made, self.copy(state))
        for item in items or ():
            made.append(self.copy(item))
        for key, item in pairs or ():
            made[self.copy(key)] = self.copy(item)
        return made

    @staticmethod
    def _set_state(made: Any, state: Any) -> None:
        if hasattr(type(made), "__setstate__"):
            made.__setstate__(state)
            return
        plain, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if plain:
            object.__getattribute__(made, "__dict__").update(plain)
        for name, value in (slots or {}).items():
            object.__setattr__(made, name, value)

    @staticmethod
    def _another(made: Any, value: Any) -> Any:
        if made is value:
            raise UncopyableError("copying it gives itself")
        return made

    def _bound(self, value: types.MethodType) -> types.MethodType:
        return types.MethodType(value.__func__, self.copy(value.__self__))

    def _built_in(self, value: Any) -> Any:
        # list.append of a live list writes there; torch.sin belongs to a module or a class.
        owner = value.__self__
        if owner is None or isinstance(owner, type | types.ModuleType):
            return value
        copied = self.copy(owner)
        return value if copied is owner else getattr(copied, value.__name__)

    def _generator(self, value: torch.Generator) -> torch.Generator:
        made = torch.Generator(value.device)
        made.set_state(value.get_state())
        return made

    def _proxy(self, value: Any) -> Any:
        return types.MappingProxyType(self.copy(dict(value)))

    def _weak(self, value: weakref.ref[Any]) -> weakref.ref[Any]:
        target = value()
        if target is None:
            return value
        if id(target) in self._memo:
            return weakref.ref(self._memo[id(target)])
        raise UncopyableError(f"it refers to a {class_name(target)} outside of the module")


def _is_number(kind: type) -> bool:
    """Whether objects of *kind* are numbers without attributes: a Fraction, a Decimal, one of numpy's."""
    return issubclass(kind, numbers.Number) and not kind.__dictoffset__


_SPECIAL: dict[type, Callable[[Copying, Any], Any]] = {
    types.MethodType: Copying._bound,
    types.BuiltinFunctionType: Copying._built_in,
    types.MappingProxyType: Copying._proxy,
    weakref.ref: Copying._weak,
    torch.Generator: Copying._generator,
}
