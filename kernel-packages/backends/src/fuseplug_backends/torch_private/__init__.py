"""The private names of torch that backends and kernels need.

They are chosen, written and tested as those of `fuseplug.torch_private`.
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

# Imported above, because nothing public names it: FakeTensor, to tell a tensor that has no values but is a plain one in
# all else.

peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of `torch.func` that is at work here; ``None`` if there is none."""

is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one that a transform of `torch.func` made around another; its type is Tensor all the same."""

is_batchedtensor = torch._C._functorch.is_batchedtensor
"""Whether a tensor is one that `torch.func.vmap` made around another."""

get_unwrapped = torch._C._functorch.get_unwrapped
"""The tensor inside one that `is_functorch_wrapped_tensor`. `torch.func.debug_unwrap` is for debugging alone."""

is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor is a batch of gradients, which ``torch.autograd.grad(is_grads_batched=True)`` makes."""

len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
"""How many modes see each operation: a FakeTensorMode, a tracer's."""

reinterpret_tensor: Callable[[Tensor, tuple[int, ...], tuple[int, ...]], Tensor]
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""``reinterpret_tensor(tensor, size, stride)``: a tensor on the same memory, from the same place on. Size and stride
are plain tuples: torch 2.15 takes neither a list nor a `torch.Size`. Autograd knows nothing of it: it is no view of
*tensor*, and requires no gradient. Inductor makes its own views so. It is no operation, so between two matmuls it takes
6 to 10 µs, where ``as_strided`` takes 20 and ``view`` up to 40 (on an Intel Xeon)."""

GLOBAL_HOOKS = (
    _nn_module._global_forward_hooks,
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_backward_hooks,
    _nn_module._global_backward_pre_hooks,
)
"""The dicts that ``torch.nn.modules.module.register_module_…_hook`` add to: those functions add, and nothing lists."""


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is entered; `torch.autograd.forward_ad` enters and leaves it only."""
    return forward_ad._current_level >= 0


def storage_id(tensor: Tensor) -> int:
    """A number that tensors on one storage share, on meta too, where ``data_ptr()`` of each is 0."""
    number: int = tensor.untyped_storage()._cdata
    return number


def has_onednn_linear() -> bool:
    """Whether this build of torch has `onednn_linear`."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.t()`` by oneDNN, where `torch.nn.functional.linear` takes MKL for float32.

    Args:
        x: ``(rows, in)``, float32 on the CPU.
        weight: ``(out, in)``, likewise.

    Returns:
        ``(rows, out)``, float32.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def traced_away(function: Callable[P, R]) -> Callable[P, R]:
    """Have Dynamo call *function* while it traces, and take what it returns for a constant.

    As `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
