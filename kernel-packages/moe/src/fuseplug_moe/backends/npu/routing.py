"""Rows from the order of the tokens to that of the experts, and back, by torch_npu's token permutation.

What it takes is in op-plugin's ``torch_npu-npu_moe_token_permute.md`` and ``torch_npu-npu_moe_token_unpermute.md``, for
Atlas A2 and A3.

An index that is negative, or not below the number of experts, stands for an expert elsewhere. Its rows are sorted to
the end, after the last group, where the grouped matmul computes nothing and leaves memory as it was. No such number
gets out again:

- going back, their weight is zero, and the operation does not read a row of weight zero (CANN's
  ``moe_token_unpermute.h``), which `masked_fill` also gives to the gradient of the weight;
- the gradient of the rows goes back the same way, under weights of one and zero;
- the gradients of weights and biases sum over groups alone;
- what may look at all rows, or has parameters of its own, a module's own gate or a norm, gets zeros there, which takes
  a pass over its rows.

For experts that are all here the rest costs three launches over ``(tokens, k)`` elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuseplug.npu import first_order

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TOP_K = 512
_SLOTS = (1 << 24) - 1
"""What the number of indices must stay below, and each of them."""


class Route(NamedTuple):
    """Where the rows of the slots, the pairs of token and expert, are.

    Attributes:
        rows: ``(tokens · k,)`` int32, the sorted row of each slot.
        counts: ``(experts,)`` int64, how many rows each expert has.
        elsewhere: ``(tokens, k)`` bool, whether the expert of a slot is not here.
    """

    rows: Tensor
    counts: Tensor
    elsewhere: Tensor

    def fill(self, tensor: Tensor) -> Tensor:
        """*tensor*, ``(tokens · k, …)``, with zeros in the rows of no expert, and in their gradients."""
        ranks = torch.arange(len(self.rows), device=tensor.device)
        return tensor.masked_fill((ranks >= self.counts.sum())[:, None], 0)


def takes(index: Tensor, weights: Tensor) -> bool:
    """Whether the permutation is documented for this routing."""
    return weights.dtype in _DTYPES and 0 < index.shape[1] <= _TOP_K and 0 < index.numel() < _SLOTS


def dispatch(x: Tensor, index: Tensor, experts: int) -> tuple[Tensor, Route]:
    """Gather the rows of *x*, ``(tokens, hidden)``, in the order of the experts in *index*, ``(tokens, k)``.

    Returns:
        ``(tokens · k, hidden)``, contiguous, those of one expert as the tokens come; and the way back.
    """
    if index.dtype not in (torch.int32, torch.int64):
        index = index.to(torch.int64)
    elsewhere = (index < 0) | (index >= experts)
    # A negative one would be sorted to the front, uncounted, and move the rows of all other experts.
    index = index.masked_fill(elsewhere, experts)
    # Of the ways to count this one is exact and waits for nobody: CANN counts integers as int32. bincount asks the
    # device how long its result is, a comparison with each expert writes tokens · k · experts bytes, and additions into
    # few addresses queue up. One bin more than experts, for those elsewhere: then none has an upper and a lower end
    # that are equal, which means the range of the data.
    counts = torch.histc(index, bins=experts + 1, min=0, max=experts)[:experts].to(torch.int64)
    rows, places = _Dispatch.apply(x, index, elsewhere)  # type: ignore[no-untyped-call]
    return rows, Route(places, counts, elsewhere)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, elsewhere: Tensor) -> tuple[Tensor, Tensor]:
        rows, places = torch.ops.npu.npu_moe_token_permute(x, index)
        ctx.save_for_backward(places, elsewhere)
        ctx.mark_non_differentiable(places)
        return rows, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        places, elsewhere = ctx.saved_tensors
        here = elsewhere.logical_not().to(grad.dtype)
        # torch_npu's own derivative is the same operation without weights, and reads every row.
        return torch.ops.npu.npu_moe_token_unpermute(grad, places, here), None, None


def combine(rows: Tensor, weights: Tensor, route: Route) -> Tensor:
    """The weighted sum of the rows of each token: ``(tokens, hidden)`` in the dtype of *rows*.

    It is summed in float32 and rounded once. A second derivative is refused, here for all that comes before.
    """
    weights = weights.masked_fill(route.elsewhere, 0)
    result: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, route.rows, weights)
    return first_order(result, "npu_moe_token_unpermute")
