"""Attention as torch's ``scaled_dot_product_attention`` calls it on an NPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import reference, wide

_CAUSAL = 2
"""The sparse mode in which the mask is the upper triangle of a fixed square, of which the corner is taken."""


def _scores(
    query: Tensor, key: Tensor, atten_mask: Tensor | None, scale: float, sparse_mode: int
) -> tuple[Tensor, Tensor]:
    """Masked scores ``[batch, heads, queries, keys]``, and the keys for each head."""
    keys = wide(key).repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = wide(query) @ keys.mT * scale
    if atten_mask is not None:
        mask = atten_mask.bool()
        if sparse_mode == _CAUSAL:
            mask = mask[: scores.shape[-2], : scores.shape[-1]]
        scores = scores.masked_fill(mask, float("-inf"))
    return scores, keys


def _modelled(layout: str, sparse_mode: int, keep_prob: float, others: dict[str, Any]) -> None:
    beyond = [
        name
        for name in ("pse", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink")
        if others.get(name) is not None
    ]
    if layout != "BNSD" or sparse_mode not in (0, _CAUSAL) or keep_prob != 1.0 or beyond:
        raise NotImplementedError(
            "npu_fusion_attention has a reference for layout BNSD, sparse_mode 0 or 2, no dropout and nothing beyond a "
            f"mask; it was called with {layout}, {sparse_mode}, keep_prob {keep_prob} {' '.join(beyond)}"
        )


@reference("npu_fusion_attention_v3")
def fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    """``softmax(q kᵀ scale) v``; the softmax's maxima and sums, eight times each; and three that stand for its state."""
    del head_num, padding_mask, pre_tockens, next_tockens, inner_precise, rest
    others = {"pse": pse, "prefix": prefix, "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen}
    _modelled(input_layout, sparse_mode, keep_prob, {**others, **options})
    scores, _ = _scores(query, key, atten_mask, scale, sparse_mode)
    values = wide(value).repeat_interleave(query.shape[1] // value.shape[1], 1)
    largest = scores.amax(-1, keepdim=True)
    total = (scores - largest).exp().sum(-1, keepdim=True)
    statistics = [each.expand(*each.shape[:-1], 8).contiguous() for each in (largest, total)]
    state = torch.zeros(1, dtype=torch.int64)
    return (scores.softmax(-1) @ values).to(query.dtype), *statistics, query.new_empty(0), state, state.clone()


@reference("npu_fusion_attention_grad_v3")
def fusion_attention_grad_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, and the gradients of two that are not there. With p the softmax: ds = p · (dp - Σ dp · p) · scale."""
    del head_num
    _modelled(input_layout, sparse_mode, keep_prob, others)
    shared = query.shape[1] // key.shape[1]
    scores, keys = _scores(query, key, atten_mask, scale_value, sparse_mode)
    values = wide(value).repeat_interleave(shared, 1)
    weights, upstream = scores.softmax(-1), wide(dy)
    of_weights = upstream @ values.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale_value

    def summed(gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (-1, shared)).sum(2)  # over the heads that share a key

    dq = (of_scores @ keys).to(query.dtype)
    dk = summed(of_scores.mT @ wide(query)).to(key.dtype)
    dv = summed(weights.mT @ upstream).to(value.dtype)
    return dq, dk, dv, query.new_empty(0), query.new_empty(0, dtype=torch.float32)
