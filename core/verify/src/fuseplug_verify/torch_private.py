"""The private names of torch that this library needs: nothing else here has one.

Each is here because torch documents nothing that says or does the same. All are in torch 2.7, the oldest that the
metadata admit.
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
"""The classes of what is in `torch.ops`: an operation, and one overload of it."""


def writes(operation: Any) -> bool:
    """Whether *operation*, one of `OPERATIONS`, writes into an argument, by the schemas of its overloads."""
    names = operation.overloads() if isinstance(operation, OPERATIONS[0]) else ()  # type: ignore[no-untyped-call]
    overloads = [getattr(operation, name) for name in names] or [operation]
    arguments = [argument for overload in overloads for argument in overload._schema.arguments]
    return any(argument.alias_info and argument.alias_info.is_write for argument in arguments)


is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one that a transform of `torch.func` made around another; its type is Tensor all the same."""

disable_current_modes = _disable_current_modes
"""Takes the modes that see each operation off inside; the public context managers only enter one."""

DYNAMO_WRAPPERS = ("torch._dynamo", "torch._compile")
"""The modules in which the decorators of `torch.compiler` are written, and those around torch's own functions."""


@contextlib.contextmanager
def function_modes_off() -> Iterator[list[Any]]:
    """Inside, no mode sees functions. Gives those that do outside.

    They are taken off the stack. What torch has to switch them off, `torch._C.DisableTorchFunction`, sets a flag that
    Dynamo guards on: a kernel compiled inside would be compiled again at run time.
    """
    with contextlib.ExitStack() as stack:
        modes = []
        while has_torch_function((None,)):  # which is true of no argument but where a mode is entered
            modes.append(stack.enter_context(_pop_mode_temporarily()))
        yield modes
