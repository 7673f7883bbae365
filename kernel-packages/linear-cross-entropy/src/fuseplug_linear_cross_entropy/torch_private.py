"""The private names of torch that lazy tensors need.

They are chosen, written and tested like those of `fuseplug.torch_private`.
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

# `temporarily_clear_interpreter_stack` is imported above, because it has no public name. It takes the transforms of
# `torch.func` off for a while, so that tensors computed inside do not belong to them.

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Inside, torch does not call ``__torch_function__`` of subclasses, so code can ask what such a tensor itself is."""

is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
"""Whether forward-mode differentiation is allowed. It is off in the forward of an `autograd.Function` and hardly
anywhere else, so this tells such a forward from ``torch.no_grad()``."""

disable_current_modes = _disable_current_modes
"""Inside, the modes that see each operation are off; the public context managers can only enter a mode."""


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


def has_foreign_function_mode() -> bool:
    """Whether a mode that sees functions does more than choose a default device."""
    with function_modes_off() as modes:
        return any(type(mode) is not DeviceContext for mode in modes)


def writes_to(op: Any) -> list[bool]:
    """Whether *op*, one overload, writes to each of its arguments. Only its private schema tells."""
    return [argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments]


def without_memory(cls: type[Tensor], layout: Tensor) -> Tensor:
    """A tensor of the subclass *cls* that has the shape, strides and dtype of *layout*, but no memory.

    ``cls.__torch_dispatch__`` answers `torch.ops.prim.device`. In torch's own checks the tensor counts as one on meta,
    so it cannot become the ``data`` of a tensor elsewhere. Asking for its address raises an error, because reading
    from there would end the process.
    """
    size, strides, dtype, meta = layout.size(), layout.stride(), layout.dtype, torch.device("meta")
    new = Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=meta, dispatch_device=True)
    torch._C._set_throw_on_mutable_data_ptr(new)
    return new


def storage_id(tensor: Tensor) -> int:
    """A number that the tensors on one storage share, even on meta, where every ``data_ptr()`` is 0."""
    number: int = tensor.untyped_storage()._cdata
    return number


def swap_values(one: Tensor, other: Tensor) -> None:
    """Swap all that torch knows about the tensor objects *one* and *other*, but not their attributes.

    `torch.utils.swap_tensors` does the same, but refuses tensors that have weak references, or that a graph has saved.
    """
    torch._C._swap_tensor_impl(one, other)
