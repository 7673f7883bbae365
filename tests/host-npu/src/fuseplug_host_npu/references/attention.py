"""Attention as torch's ``scaled_dot_product_attention`` calls it on an NPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..generators import drawing
from .common import wide
from .registry import reference

_CAUSAL = 2
"""The sparse mode in which the mask is the upper triangle of a fixed square, and only its corner is used."""


def _modelled(layout: str, sparse_mode: int, **others: Any) -> None:
    beyond = [
        f"{name}={each!r}"
        for name, each in others.items()
        if name in ("pse", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink") and each is not None
    ]
    if layout != "BNSD" or sparse_mode not in (0, _CAUSAL) or beyond:
        raise NotImplementedError(
            "npu_fusion_attention_v3 has a reference for input_layout='BNSD', sparse_mode 0 or 2, a mask and dropout, "
            f"not for {layout!r}, {sparse_mode} {' '.join(beyond)}"
        )


def _dropped(weights: Tensor, keep_prob: float, seed: Tensor) -> Tensor:
    """*weights* with dropout; the same seed drops the same weights."""
    if keep_prob == 1.0:
        return weights
    generator = torch.Generator().manual_seed(int(seed))
    kept = torch.rand(weights.shape, generator=generator) < keep_prob
    return torch.where(kept, weights / keep_prob, 0.0)


def _shared(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values, repeated for each head of the query, in wide precision."""
    return wide(tensor).repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """The transpose of `_shared`: *gradient* summed over the heads that share a key."""
    batch, _, *rest = gradient.shape
    return gradient.reshape(batch, heads, -1, *rest).sum(2)


def _scores(query: Tensor, key: Tensor, atten_mask: Tensor | None, scale: float, sparse_mode: int) -> Tensor:
    """``[batch, heads, queries, keys]``, with the least number where the mask, if there is one, is true.

    Not -inf: torch_npu's pages say that a completely masked row "loses precision", and do not mention NaN.
    """
    scores = wide(query) @ _shared(key, query).mT * scale
    if atten_mask is None:
        return scores
    mask = atten_mask.bool()
    if sparse_mode == _CAUSAL:
        mask = mask[: scores.shape[-2], : scores.shape[-1]]
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min)


@reference("npu_fusion_attention_v3")
def fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, ...]:
    """``softmax(q kᵀ scale) v``; the softmax's maxima and sums, eight times each; seed and offset of the dropout."""
    del head_num
    _modelled(input_layout, sparse_mode, **others)
    scores = _scores(query, key, atten_mask, scale, sparse_mode)
    largest = scores.amax(-1, keepdim=True)
    total = (scores - largest).exp().sum(-1, keepdim=True)
    statistics = [each.expand(*each.shape[:-1], 8).contiguous() for each in (largest, total)]
    seed = torch.zeros(1, dtype=torch.int64)
    if keep_prob != 1.0:
        with drawing():
            seed.random_()
    result = _dropped(scores.softmax(-1), keep_prob, seed) @ _shared(value, query)
    return result.to(query.dtype), *statistics, query.new_empty(0), seed, torch.zeros_like(seed)


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
    seed: Tensor | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, ...]:
    """dq, dk, dv, and empty gradients of two absent inputs. With p the softmax: ds = p · (dp - Σ dp · p) · scale."""
    del head_num
    _modelled(input_layout, sparse_mode, **others)
    state = torch.zeros(1, dtype=torch.int64) if seed is None else seed
    upstream = wide(dy)
    weights = _scores(query, key, atten_mask, scale_value, sparse_mode).softmax(-1)
    of_weights = _dropped(upstream @ _shared(value, query).mT, keep_prob, state)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale_value
    dq = of_scores @ _shared(key, query)
    dk = _summed(of_scores.mT @ wide(query), key.shape[1])
    dv = _summed(_dropped(weights, keep_prob, state).mT @ upstream, value.shape[1])
    absent = query.new_empty(0), query.new_empty(0, dtype=torch.float32)
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), *absent
