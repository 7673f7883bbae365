"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .common import wide
from .registry import reference


def _rotated(x: Tensor, mode: str) -> Tensor:
    """``(-x2, x1)``, where x1 and x2 are the halves of the last dim, or its pairs."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rotated_back(x: Tensor, mode: str) -> Tensor:
    """The transpose of `_rotated`, which is its negative."""
    return -_rotated(x, mode)


@reference("npu_rotary_mul")
def rotary_mul(
    input: Tensor,  # noqa: A002
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    rotate: Tensor | None = None,
) -> Tensor:
    """``x * cos + rotated(x) * sin``; cos and sin, of x's dtype, broadcast. *rotate* is the rotation as a matrix."""
    x, cos, sin = (wide(tensor.to(input.dtype)) for tensor in (input, r1, r2))
    rotated = _rotated(x, rotary_mode) if rotate is None else x @ wide(rotate)
    return (x * cos + rotated * sin).to(input.dtype)


@reference("npu_rotary_mul_backward")
def rotary_mul_backward(
    grad: Tensor,
    input: Tensor,  # noqa: A002
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dcos and dsin; dcos and dsin are summed over the dims along which cos and sin were broadcast."""
    dtype = input.dtype
    upstream, x, cos, sin = (wide(tensor.to(dtype)) for tensor in (grad, input, r1, r2))
    dx = upstream * cos + _rotated_back(upstream * sin, rotary_mode)
    dcos = (upstream * x).sum_to_size(r1.shape)
    dsin = (upstream * _rotated(x, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(dtype), dcos.to(dtype), dsin.to(dtype)


@reference("npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """`rotary_mul` of query and of key, which have the layout of cos and sin."""
    del layout  # cos and sin have size 1 where they are broadcast
    return rotary_mul(query, cos, sin, rotary_mode), rotary_mul(key, cos, sin, rotary_mode)


@reference("npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of x into halves, and rotate these, as the weights of DeepSeek's attention require."""
    halves = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return rotary_mul(halves, cos, sin)


@reference("npu_mrope")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[Tensor, Tensor]:
    """Rotate the first ``rotary_dim`` elements of each head of ``[tokens, heads * head_size]``.

    *cos_sin_cache* is ``[positions, rotary_dim]``, cos before sin. Positions of three kinds (time, height, width) are
    ``[3, tokens]``: each kind gives the positions of one section of a head's frequencies, or of every third frequency
    if *cache_mode* is ``"interleave"``.
    """
    rotary = cos_sin_cache.shape[-1]
    cos, sin = wide(cos_sin_cache)[positions].chunk(2, -1)
    if positions.dim() == 2:
        mix = _every_third if cache_mode == "interleave" else _one_after_the_other
        sections = list(mrope_section or ())
        cos, sin = mix(cos, sections), mix(sin, sections)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        heads = wide(x).reshape(x.shape[0], -1, head_size)
        turned, rest = heads[..., :rotary], heads[..., rotary:]
        half = rotary_mode != "interleaved"
        first, second = turned.chunk(2, -1) if half else (turned[..., ::2], turned[..., 1::2])
        parts = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)
        return torch.cat((turned, rest), -1).reshape(x.shape).to(x.dtype)

    return rotate(query), rotate(key)


def _one_after_the_other(table: Tensor, sections: list[int]) -> Tensor:
    return torch.cat([part[kind] for kind, part in enumerate(torch.split(table, sections, -1))], -1)


def _every_third(table: Tensor, sections: list[int]) -> Tensor:
    mixed = table[0].clone()
    for kind in (1, 2):
        at = slice(kind, sections[kind] * 3, 3)
        mixed[..., at] = table[kind][..., at]
    return mixed
