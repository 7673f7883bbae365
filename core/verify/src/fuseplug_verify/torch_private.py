"""The private names of torch that this library needs. No other module of the library uses one.

Each is needed because torch documents nothing equivalent. All exist in torch 2.7, the oldest release that the metadata
allow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "DYNAMO_WRAPPERS",
    "OPERATIONS",
    "disable_current_modes",
    "function_modes_off",
    "is_functorch_wrapped_tensor",
    "writes",
]

OPERATIONS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
"""The classes of the objects in `torch.ops`: an operation, and one overload of an operation."""


def writes(operation: Any) -> bool:
    """Whether the schemas of *operation*, an instance of `OPERATIONS`, say that it writes into an argument."""
    names = operation.overloads() if isinstance(operation, OPERATIONS[0]) else ()  # type: ignore[no-untyped-call]
    overloads = [getattr(operation, name) for name in names] or [operation]
    arguments = [argument for overload in overloads for argument in overload._schema.arguments]
    return any(argument.alias_info and argument.alias_info.is_write for argument in arguments)


is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is a wrapper that a transform of `torch.func` made around another. Its type is plain Tensor."""

disable_current_modes = _disable_current_modes
"""A context manager that disables the modes which see each operation. The public ones can only enter a mode."""

DYNAMO_WRAPPERS = ("torch._dynamo", "torch._compile")
"""The Python modules that define the decorators of `torch.compiler` and those around torch's own functions."""


@contextlib.contextmanager
def function_modes_off() -> Iterator[list[Any]]:
    """Run the body without the modes that see functions, and yield the modes that are active outside.

    The modes are taken off their stack. Torch's own switch, `torch._C.DisableTorchFunction`, sets a flag that Dynamo
    guards on: a kernel compiled inside would be compiled again at run time.
    """
    with contextlib.ExitStack() as stack:
        modes = []
        while has_torch_function((None,)):  # true of None only while a mode is active
            modes.append(stack.enter_context(_pop_mode_temporarily()))
        yield modes
