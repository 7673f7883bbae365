"""The private names of torch that lazy tensors need.

They are chosen, written and tested as those of `fuseplug.torch_private`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _pop_mode_temporarily, has_torch_function
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "DisableTorchFunctionSubclass",
    "disable_current_modes",
    "function_modes_off",
    "has_foreign_function_mode",
    "is_fwd_grad_enabled",
    "storage_id",
    "swap_values",
    "temporarily_clear_interpreter_stack",
    "without_memory",
    "writes_to",
]

# Imported above, because nothing public names it: what takes the transforms of `torch.func` off for a while, so that
# what is computed inside is no tensor of theirs.

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""While it is entered, ``__torch_function__`` of subclasses is not called, so a subclass can ask what it is itself."""

is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
"""Whether forward-mode differentiation may be entered. It may not in the forward of an `autograd.Function`, and hardly
anywhere else, so this tells such a forward from ``torch.no_grad()``."""

disable_current_modes = _disable_current_modes
"""Takes the modes that see each operation off inside; the public context managers only enter one."""


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


def has_foreign_function_mode() -> bool:
    """Whether a mode sees functions that does more than to choose a default device."""
    with function_modes_off() as modes:
        return any(type(mode) is not DeviceContext for mode in modes)


def writes_to(op: Any) -> list[bool]:
    """Whether *op*, one overload, writes to each of its arguments. Its schema says so, and nothing public does."""
    return [argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments]


def without_memory(cls: type[Tensor], layout: Tensor) -> Tensor:
    """A tensor of the subclass *cls* with shape, strides and dtype of *layout* that has no memory.

    ``cls.__torch_dispatch__`` answers `torch.ops.prim.device`. For torch's own checks the tensor is on meta, so it
    cannot become the ``data`` of a tensor elsewhere; and to ask for its address is an error. Reading from none would
    end the process.
    """
    size, strides, dtype, meta = layout.size(), layout.stride(), layout.dtype, torch.device("meta")
    new = Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=meta, dispatch_device=True)
    torch._C._set_throw_on_mutable_data_ptr(new)
    return new


def storage_id(tensor: Tensor) -> int:
    """A number that tensors on one storage share, on meta too, where ``data_ptr()`` of each is 0."""
    number: int = tensor.untyped_storage()._cdata
    return number


def swap_values(one: Tensor, other: Tensor) -> None:
    """Have the tensor objects *one* and *other* exchange all that torch knows of them, not their attributes.

    As `torch.utils.swap_tensors`, which refuses tensors that somebody refers to weakly, or that a graph has saved.
    """
    torch._C._swap_tensor_impl(one, other)
