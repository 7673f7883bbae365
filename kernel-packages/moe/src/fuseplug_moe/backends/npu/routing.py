"""Moves rows from the order of the tokens to that of the experts and back, by torch_npu's token permutation.

op-plugin's ``torch_npu-npu_moe_token_permute.md`` and ``torch_npu-npu_moe_token_unpermute.md`` document it.

An index that is negative, or not below the number of experts, stands for an expert elsewhere. Its rows are sorted to
the end, after the last group, where the grouped matmul computes nothing and leaves the memory as it was. None of these
undefined numbers gets out again:

- A slot of an expert elsewhere has the number after the last row. On the way back, the operation skips slots whose row
  does not exist, on every chip (CANN's ``moe_token_unpermute.h``), and gives their weights a gradient of zero. A weight
  of zero would suffice on Atlas A2 and A3, but Ascend 950 multiplies by it. Nothing writes the gradient of the row
  itself.
- The gradient of the rows goes back the same way.
- The gradients of weights and biases sum over the groups only.
- A function that may look at all rows, or has parameters of its own, such as a module's own gate or a norm, gets zeros
  in these rows, and zeros for their gradient. That takes two passes over its rows.

If all experts are here, these measures cost two launches over ``(tokens, k)`` elements.
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
"""The bound below which the number of indices, and each index, must stay."""


class Route(NamedTuple):
    """Where the row of each slot, a (token, expert) pair, is.

    Attributes:
        rows: ``(tokens · k,)`` int32, the sorted row of each slot; ``tokens · k`` if the slot's expert is elsewhere.
        counts: ``(experts,)`` int64, the number of rows of each expert.
    """

    rows: Tensor
    counts: Tensor

    def fill(self, tensor: Tensor) -> Tensor:
        """*tensor*, ``(tokens · k, …)``, with zeros in the rows of no expert here, and in their gradients."""
        ranks = torch.arange(len(self.rows), device=tensor.device)
        return tensor.masked_fill((ranks >= self.counts.sum())[:, None], 0)


def takes(index: Tensor, weights: Tensor) -> bool:
    """Whether the permutation is documented for this routing."""
    return have_model_dtypes(weights) and 0 < index.shape[1] <= _TOP_K and 0 < index.numel() < _SLOTS


def dispatch(x: Tensor, index: Tensor, experts: int) -> tuple[Tensor, Route]:
    """Gather the rows of *x*, ``(tokens, hidden)``, in the order of the experts in *index*, ``(tokens, k)``.

    Returns:
        The rows, ``(tokens · k, hidden)``, contiguous, those of one expert in the order of the tokens; and the way
        back.
    """
    if index.dtype not in (torch.int32, torch.int64):
        index = index.to(torch.int64)
    elsewhere = (index < 0) | (index >= experts)
    # A negative index would be sorted to the front, uncounted, and move the rows of all experts.
    index = index.masked_fill(elsewhere, experts)
    # histc waits for nothing, and is exact, because CANN counts integers as int32. bincount asks the device how long
    # its result is, a comparison with each expert writes tokens · k · experts bytes, and additions into few addresses
    # queue up. There is one bin more than experts, for those elsewhere. So min and max are never equal: equal ones
    # stand for the range of the data.
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

    The sum is in float32, and rounded once. A second derivative is refused here, for all previous steps, too.
    """
    result: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, route.rows, weights)
    return first_order(result, "npu_moe_token_unpermute")
