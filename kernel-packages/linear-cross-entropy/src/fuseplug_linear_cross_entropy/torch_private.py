"""The private names of torch that lazy tensors need.

They are chosen, written and tested as those of `fuseplug.torch_private`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DisableTorchFunctionSubclass",
    "disable_current_modes",
    "disable_dynamo",
    "function_modes_off",
    "has_foreign_function_mode",
    "is_fwd_grad_enabled",
    "len_torch_function_stack",
    "saves_are_hooked",
    "schemas_of",
    "storage_id",
    "swap_values",
    "temporarily_clear_interpreter_stack",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_memory",
]

# Imported above, because nothing public names them: the types of operations (torch.ops has only instances); pytree,
# with which torch itself walks through arguments and results; the modes that see each function, with the one that
# ``with torch.device("meta"):`` enters; and what takes the transforms of `torch.func` off for a while, so that what is
# computed inside is no tensor of theirs.

len_torch_function_stack = torch._C._len_torch_function_stack
"""How many modes see each function: ``with torch.device("meta"):`` enters one."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""While it is entered, ``__torch_function__`` of subclasses is not called, so a subclass can ask what it is itself."""

is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
"""Whether forward-mode differentiation may be entered. It may not in the forward of an `autograd.Function`, and hardly
anywhere else, so this tells such a forward from ``torch.no_grad()``."""

disable_current_modes = _disable_current_modes
"""Takes the modes that see each operation off inside; the public context managers only enter one."""

disable_dynamo = _disable_dynamo
"""As `torch.compiler.disable`, which imports Dynamo where it decorates; this imports it at the first call."""


@contextlib.contextmanager
def function_modes_off() -> Iterator[None]:
    """Inside, no mode sees functions.

    They are taken off the stack. What torch has to switch them off, `torch._C.DisableTorchFunction`, sets a flag that
    Dynamo guards on: a kernel compiled inside would be compiled again at run time.
    """
    modes = []
    while len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def has_foreign_function_mode() -> bool:
    """Whether a mode sees functions that does more than to choose a default device."""
    return bool(len_torch_function_stack()) and not all(
        type(mode) is DeviceContext
        for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    )


def saves_are_hooked() -> bool:
    """Whether somebody, `torch.utils.checkpoint` for one, sees here what is saved for a backward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def schemas_of(op: OpOverload | OpOverloadPacket) -> list[torch._C.FunctionSchema]:
    """The schemas of *op*, one for each overload. They say which arguments it writes to, and nothing public does."""
    if isinstance(op, OpOverload):
        return [op._schema]
    return list(torch._C._jit_get_schemas_for_operator(op._qualified_op_name))


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
