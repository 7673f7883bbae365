"""Routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..limits import sources
from ..machine import machine
from .common import wide
from .registry import reference
from .values import require_values

_EXACT = 1 << 24
"""float32, in which keys are sorted, holds all integers up to this one."""


@reference("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest probabilities of a softmax, not renormalised, their experts, and the rows that they go to.

    Rows are counted column by column: slot (token, choice) goes to row ``choice * tokens + token``. Every expert of a
    finished token has the number one past the last expert.
    """
    weights, experts = wide(x).softmax(-1).topk(k, -1)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.shape[-1])
    tokens = weights[..., 0].numel()
    rows = torch.arange(tokens * k, dtype=torch.int32).reshape(k, tokens).T.reshape(experts.shape)
    return weights.to(x.dtype), experts.int(), rows.contiguous()


def _unpadded(padded_mode: bool) -> None:
    if padded_mode:
        raise NotImplementedError("padded_mode=True has no reference, and no kernel on A2 and A3")


@reference("npu_moe_token_permute")
def token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """The tokens sorted by expert, each once for each of its experts, and the row of each (token, choice).

    The sort is stable. A positive *num_out_tokens* is the number of rows to keep; a negative one, the number to drop.
    """
    _unpadded(padded_mode)
    held = indices.abs().max() <= _EXACT if indices.numel() else True
    op, asked = "npu_moe_token_permute", f"integers up to {_EXACT}, as they are sorted as float32"
    require_values(held, op, "indices", asked, indices.tolist(), "aclnnMoeTokenPermute.md")
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    order = torch.argsort(indices.reshape(-1), stable=True)
    wanted = num_out_tokens or 0
    kept = min(wanted, order.numel()) if wanted > 0 else order.numel() + wanted
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.numel())
    return tokens.index_select(0, order[:kept] // max(choices, 1)), rows.int()


@reference("npu_moe_token_permute_grad_v2")
def token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,  # noqa: N803 - torch_npu's name
    padded_mode: bool = False,
) -> Tensor:
    """The sum over the choices of each token; a choice whose row was dropped adds nothing."""
    _unpadded(padded_mode)
    del tokens_size_0
    return _gathered(grad_permuted_tokens, sorted_indices, num_topK).sum(1).to(tokens_dtype)


@reference("npu_moe_token_permute_grad")
def token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """As `token_permute_grad_v2`, under its older name."""
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    return token_permute_grad_v2(
        grad_permuted_tokens, sorted_indices, tokens.shape[0], tokens.dtype, choices, padded_mode
    )


def _gathered(permuted: Tensor, rows: Tensor, choices: int) -> Tensor:
    """The row of each choice, ``[tokens, choices, hidden]``; zeros if there is no row of that number."""
    hidden = permuted.shape[-1]
    padded = torch.cat((wide(permuted), wide(permuted).new_zeros(1, hidden)))
    places = _places(rows, len(permuted))
    return padded[places].reshape(len(rows) // choices, choices, hidden)


def _places(rows: Tensor, count: int) -> Tensor:
    """*rows*, with *count* for each row to skip: the rows from *count* on, and on Ascend 950 row -1, too."""
    rows = rows.long()
    if machine().is_950:
        rows = rows.masked_fill(rows == -1, count)
    named = "npu_moe_token_unpermute", "sorted_indices"
    require_values(rows.min() >= 0 if len(rows) else True, *named, "not negative", rows.tolist(), sources.UNPERMUTE)
    kept = rows[rows < count]
    once = len(kept) == len(set(kept.tolist()))
    require_values(once, *named, "each once", rows.tolist(), "aclnnMoeTokenUnpermute.md")
    return rows.clamp(max=count)


@reference("_npu_moe_token_unpermute")
def _token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens of `token_unpermute`, and a copy of the permuted tokens for the backward."""
    return token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape), permuted_tokens.clone()


@reference("npu_moe_token_unpermute")
def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """The rows of each token, weighted with *probs*, summed in float32, and rounded once to the dtype of the rows.

    A row that does not exist is skipped. A2 and A3 do not read a row whose weight is zero, so a NaN in it does not
    show; Ascend 950 multiplies it.
    """
    _unpadded(padded_mode)
    del restore_shape  # for padded_mode
    rows = _gathered(permuted_tokens, sorted_indices, 1 if probs is None else probs.shape[1])
    if probs is not None:
        weights = wide(probs).unsqueeze(-1)
        count = len(permuted_tokens)
        skipped = (_places(sorted_indices, count) == count).reshape(weights.shape)
        if not machine().is_950:
            skipped |= weights == 0
        rows = torch.where(skipped, 0.0, rows * weights)
    return rows.sum(1).to(permuted_tokens.dtype)


@reference("npu_moe_token_unpermute_grad_v2")
def token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows and of *probs*, each in its dtype.

    The gradient of a row that belongs to no choice is not written. The gradient of the weight of a choice without a row
    is zero.
    """
    _unpadded(padded_mode)
    del restore_shape
    upstream = wide(grad_unpermuted_tokens)
    choices = 1 if probs is None else probs.shape[1]
    slots = upstream.repeat_interleave(choices, 0)
    if probs is not None:
        slots = slots * wide(probs).reshape(-1, 1)
    rows = _places(sorted_indices, permuted_tokens_size_0)
    kept = rows < permuted_tokens_size_0
    of_rows = upstream.new_full((permuted_tokens_size_0, upstream.shape[-1]), float("nan"))
    of_rows[rows[kept]] = slots[kept]
    if probs is None or permuted_tokens is None:
        return of_rows.to(permuted_tokens_dtype), grad_unpermuted_tokens.new_empty(0)
    of_probs = (_gathered(permuted_tokens, sorted_indices, choices) * upstream.unsqueeze(1)).sum(-1)
    return of_rows.to(permuted_tokens_dtype), of_probs.to(probs.dtype)


@reference("npu_moe_token_unpermute_grad")
def token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `token_unpermute_grad_v2`, under its older name."""
    size, dtype = permuted_tokens.shape[0], permuted_tokens.dtype
    return token_unpermute_grad_v2(
        grad_unpermuted_tokens, sorted_indices, size, dtype, probs, padded_mode, restore_shape, permuted_tokens
    )
