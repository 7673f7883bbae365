"""Rows from the order of the tokens to that of the experts, and back, by torch_npu's token permutation.

What it takes is in op-plugin's ``torch_npu-npu_moe_token_permute.md`` and ``torch_npu-npu_moe_token_unpermute.md``.

An index that is negative, or not below the number of experts, stands for an expert elsewhere. Its rows are sorted to
the end, after the last group, where the grouped matmul computes nothing and leaves memory as it was. No such number
gets out again:

- a slot of an expert elsewhere has the number after the last row. Going back, the operation skips what has no such
  row, on every chip (CANN's ``moe_token_unpermute.h``), and gives its weight a gradient of zero. A weight of zero would
  do on Atlas A2 and A3, but Ascend 950 multiplies by it. The row itself has a gradient that nobody wrote;
- the gradient of the rows goes back the same way;
- the gradients of weights and biases sum over groups alone;
- what may look at all rows, or has parameters of its own, a module's own gate or a norm, gets zeros there, and zeros
  for the gradient, which takes two passes over its rows.

For experts that are all here the rest costs two launches over ``(tokens, k)`` elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.npu import first_order

_TOP_K = 512
_SLOTS = (1 << 24) - 1
"""What the number of indices must stay below, and each of them."""


class Route(NamedTuple):
    """Where the rows of the slots, the pairs of token and expert, are.

    Attributes:
        rows: ``(tokens · k,)`` int32, the sorted row of each slot; ``tokens · k`` if its expert is not here.
        counts: ``(experts,)`` int64, how many rows each expert has.
    """

    rows: Tensor
    counts: Tensor

    def fill(self, tensor: Tensor) -> Tensor:
        """*tensor*, ``(tokens · k, …)``, with zeros in the rows of no expert, and in their gradients."""
        ranks = torch.arange(len(self.rows), device=tensor.device)
        return tensor.masked_fill((ranks >= self.counts.sum())[:, None], 0)


def takes(index: Tensor, weights: Tensor) -> bool:
    """Whether the permutation is documented for this routing."""
    return have_model_dtypes(weights) and 0 < index.shape[1] <= _TOP_K and 0 < index.numel() < _SLOTS


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
    return rows, Route(places, counts)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, elsewhere: Tensor) -> tuple[Tensor, Tensor]:
        rows, places = torch.ops.npu.npu_moe_token_permute(x, index)
        places = places.masked_fill(elsewhere.flatten(), len(places))
        ctx.save_for_backward(places)
        ctx.choices = index.shape[1]
        ctx.mark_non_differentiable(places)
        return rows, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        weights = grad.new_ones(len(places) // ctx.choices, ctx.choices)
        # torch_npu's own derivative is the same operation without weights.
        return torch.ops.npu.npu_moe_token_unpermute(grad, places, weights), None, None


def combine(rows: Tensor, weights: Tensor, route: Route) -> Tensor:
    """The weighted sum of the rows of each token: ``(tokens, hidden)`` in the dtype of *rows*.

    It is summed in float32 and rounded once. A second derivative is refused, here for all that comes before.
    """
    result: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, route.rows, weights)
    return first_order(result, "npu_moe_token_unpermute")
