"""Copies the attributes of modules, so that a copy shares nothing that can change with its module."""

from __future__ import annotations

import enum
import io
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..reading.lookup import Memoised
from ..safe_access import class_name, said_by

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset})

_SHARED = frozenset(
    {
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
        *(types.FunctionType, types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType, property),
        *(Memoised, torch.jit.ScriptFunction),
    }
)
"""Types of values that are shared instead of copied: they cannot change, or are code."""

_MOST_OBJECTS = 10_000
"""A value that leads to more objects than this does not belong to one module: it leads to the rest of a program."""


class UncopyableError(Exception):
    """Something can neither be copied nor be shared."""


class Uncopied:
    """Stands in for a value that cannot be copied: a forward that needs the value raises, and all others run.

    Args:
        name: The attribute that held the value.
        value: What could not be copied.
        why: The error that copying it raised, in words.
    """

    def __init__(self, name: str, value: object, why: str) -> None:
        self.__dict__["_why"] = (
            f"its attribute {name}, a {class_name(value)}, cannot be copied, and planning runs copies only ({why}): "
            "make it copyable, or leave the module out with skip="
        )

    def __repr__(self) -> str:
        return f"<not copied: {self.__dict__['_why']}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TypeError(self._why)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(self._why)

    __bool__ = __call__ = __setattr__ = __enter__ = __exit__ = __iter__ = __len__ = __getitem__ = __setitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse


class Copying:
    """Copies values deeply, by the pickle protocol.

    Args:
        tensor: Makes the copy of a tensor.
        module: Makes the copy of a module.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor], module: Callable[[nn.Module], nn.Module]) -> None:
        self._tensor = tensor
        self._module = module

    def attributes(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of *attributes*, with an `Uncopied` for each value that cannot be copied."""
        copies = self._copied("", dict(attributes))
        if type(copies) is dict:
            return copies
        return {name: self._copied(name, value) for name, value in attributes.items()}

    def _copied(self, name: str, value: Any) -> Any:
        file = io.BytesIO()
        try:
            pickler = _Pickler(file, self._tensor, self._module)
            pickler.dump(value)
            file.seek(0)
            return _Unpickler(file, pickler.shared).load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a third party's __reduce__ may raise anything, or exit
            return Uncopied(name, value, str(error) if type(error) is UncopyableError else said_by(error))


class _Pickler(pickle.Pickler):
    """Pickles everything except tensors, modules and shared values, which `shared` holds by id."""

    def __init__(
        self, file: io.BytesIO, tensor: Callable[[Tensor], Tensor], module: Callable[[nn.Module], nn.Module]
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: dict[int, Any] = {}
        self._tensor = tensor
        self._module = module
        # Kept alive, so that the id of a temporary object is not reused for another one.
        self._alive: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if kind in _PLAIN:
            return None
        if id(value) not in self.shared:
            self._alive.append(value)
            if len(self._alive) > _MOST_OBJECTS:
                raise UncopyableError(f"it leads to more than {_MOST_OBJECTS} objects")
            if issubclass(kind, Tensor):
                copy: Any = self._tensor(value)
            elif issubclass(kind, nn.Module):
                copy = self._module(value)
            elif _is_shared(kind, value):
                copy = value
            else:
                return None
            self.shared[id(value)] = copy
        return id(value)

    def reducer_override(self, value: Any) -> Any:
        # Python would look the method up by its name, which may mean another function on the copy.
        return (
            (types.MethodType, (value.__func__, value.__self__)) if type(value) is types.MethodType else NotImplemented
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> Any:
        return self._shared[number]


def _is_shared(kind: type, value: Any) -> bool:
    if kind is types.BuiltinFunctionType:
        # The append of a live list writes into that list. torch.sin belongs to a module or a class.
        return value.__self__ is None or isinstance(value.__self__, type | types.ModuleType)
    return kind in _SHARED or kind is Uncopied or issubclass(kind, type | types.ModuleType | enum.Enum)
