"""The private names of torch that backends and kernels need.

They are chosen, written and tested by the rules of `fuseplug.torch_private`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules import module as _nn_module

__all__ = [
    "GLOBAL_HOOKS",
    "FakeTensor",
    "get_unwrapped",
    "has_onednn_linear",
    "in_forward_mode",
    "is_batchedtensor",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "len_torch_dispatch_stack",
    "onednn_linear",
    "peek_interpreter_stack",
    "reinterpret_tensor",
    "storage_id",
    "traced_away",
]

P = ParamSpec("P")
R = TypeVar("R")

# FakeTensor is imported above because it has no public name. It identifies tensors that have no values, but are plain
# in every other way.

peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of `torch.func` that is at work here; ``None`` if there is none."""

is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is a wrapper that a transform of `torch.func` made; its type is `Tensor` all the same."""

is_batchedtensor = torch._C._functorch.is_batchedtensor
"""Whether a tensor is a wrapper that `torch.func.vmap` made."""

get_unwrapped = torch._C._functorch.get_unwrapped
"""The tensor inside a wrapper of `torch.func`. The public `torch.func.debug_unwrap` is for debugging only."""

is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor is a batch of gradients, which ``torch.autograd.grad(is_grads_batched=True)`` makes."""

len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
"""How many modes see each operation, such as a FakeTensorMode or the mode of a tracer."""

reinterpret_tensor: Callable[[Tensor, tuple[int, ...], tuple[int, ...]], Tensor]
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""``reinterpret_tensor(tensor, size, stride)``: a tensor on the same memory, from the same place on. Size and stride
must be plain tuples: torch 2.15 takes neither a list nor a `torch.Size`. Autograd does not know of the result: it is no
view of *tensor*, and requires no gradient. Inductor makes its own views in this way. The call is not an operation of
torch, so between two matmuls it takes 6 to 10 µs, while ``as_strided`` takes 20 and ``view`` up to 40 (on an Intel
Xeon)."""

GLOBAL_HOOKS = (
    _nn_module._global_forward_hooks,
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_backward_hooks,
    _nn_module._global_backward_pre_hooks,
)
"""The dicts of the hooks that ``torch.nn.modules.module.register_module_…_hook`` add. Nothing public lists them."""


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on. `torch.autograd.forward_ad` can enter and leave it, but not tell."""
    return forward_ad._current_level >= 0


def storage_id(tensor: Tensor) -> int:
    """A number that the tensors on one storage share, even on meta, where every ``data_ptr()`` is 0."""
    number: int = tensor.untyped_storage()._cdata
    return number


def has_onednn_linear() -> bool:
    """Whether this build of torch has `onednn_linear`."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.t()`` by oneDNN. For float32, `torch.nn.functional.linear` uses MKL.

    Args:
        x: ``(rows, in)``, float32 on the CPU.
        weight: ``(out, in)``, likewise.

    Returns:
        ``(rows, out)``, float32.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def traced_away(function: Callable[P, R]) -> Callable[P, R]:
    """Make Dynamo call *function* while it traces, and treat the result as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
