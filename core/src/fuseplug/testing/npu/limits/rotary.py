"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contract import limit, require
from .common import is_float, is_index

_WIDEST = 896
_MOST = 1000
_MOST_WITH_GRADIENTS = 1024


def _layouts(x: torch.Size, half: bool) -> dict[tuple[int, ...], tuple[int, int]]:
    """The documented shapes of cos for x, all but the last dim; for each the sizes of x called batch and heads."""
    if len(x) == 3:
        tokens, heads = x[0], x[1]
        return {(tokens, 1): (1, heads), (tokens, heads): (1, heads)}
    one, two, three = x[:3]
    only_sequence: dict[tuple[int, ...], tuple[int, int]] = {
        (1, 1, three): (one, two),
        (1, two, 1): (one, three),
        (one, 1, 1): (two, three),
    }
    if not half:
        return only_sequence
    with_batch: dict[tuple[int, ...], tuple[int, int]] = {(one, 1, three): (one, two), (one, two, 1): (one, three)}
    return {**only_sequence, **with_batch, (one, two, three): (one, two)}


@limit("npu_rotary_mul", page="torch_npu-npu_rotary_mul.md")
def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> None:  # noqa: A002
    """Full width cos (r1) and sin (r2), in one of the layouts 11SD, B1SD, 1S1D, BS1D, S11D, SB1D, T1D or that of x."""
    require(input.dim() in (3, 4), "input", "of 3 or 4 dims", input)
    require(rotary_mode in ("half", "interleave"), "rotary_mode", "'half' or 'interleave'", rotary_mode)
    half = rotary_mode == "half"
    width = input.shape[-1]
    require(width % 2 == 0 and width < _WIDEST, "input", f"of an even last dim below {_WIDEST}", input)
    for name, tensor in (("input", input), ("r1", r1), ("r2", r2)):
        is_float(name, tensor)
    require(r2.shape == r1.shape, "r2", f"of the shape of r1 {list(r1.shape)}", r2)
    require(r1.dim() == input.dim() and r1.shape[-1] == width, "r1", f"of as many dims, the last {width}", r1)
    layouts = _layouts(input.shape, half)
    shape = tuple(r1.shape[:-1])
    allowed = ", ".join(str([*each, width]) for each in layouts)
    require(shape in layouts, "r1", f"one of {allowed} in {rotary_mode} mode for input {list(input.shape)}", r1)
    batch, heads = layouts[shape]
    if half:
        require(batch < _MOST and heads < _MOST, "input", f"of a batch and heads below {_MOST}", input)
        if r1.requires_grad or r2.requires_grad:
            few = batch * heads <= _MOST_WITH_GRADIENTS
            require(few, "input", f"of batch × heads up to {_MOST_WITH_GRADIENTS} where r1 or r2 want gradients", input)
    else:
        require(batch * heads < _MOST, "input", f"of batch × heads below {_MOST} in interleave mode", input)
    if rotate is not None:
        wanted = any(tensor.requires_grad for tensor in (input, r1, r2))
        require(not wanted, "rotate", "left out where gradients are wanted: it has no backward", rotate)


@limit("npu_mrope", page="torch_npu-npu_mrope.md")
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None,
    rotary_mode: str | None,
    cache_mode: str | None,
) -> None:
    """One dtype; sizes in whole blocks of 32 elements, of 16 in float32."""
    is_index("positions", positions)
    is_float("query", query)
    for name, tensor in (("key", key), ("cos_sin_cache", cos_sin_cache)):
        require(tensor.dtype == query.dtype, name, f"{query.dtype}, as query is", tensor)
    for name, tensor in (("query", query), ("key", key), ("cos_sin_cache", cos_sin_cache)):
        require(tensor.dim() == 2, name, "of 2 dims", tensor)
    block = 16 if query.dtype == torch.float32 else 32
    rotary = cos_sin_cache.shape[-1]
    require(head_size % block == 0, "head_size", f"a multiple of {block}", head_size)
    fits = rotary % block == 0 and rotary <= head_size
    require(fits, "cos_sin_cache", f"as wide as a multiple of {block} up to head_size {head_size}", cos_sin_cache)
    require(rotary_mode in ("half", "interleaved"), "rotary_mode", "'half' or 'interleaved'", rotary_mode)
    require(cache_mode in ("default", "interleave"), "cache_mode", "'default' or 'interleave'", cache_mode)
    if positions.dim() == 2:
        total = sum(mrope_section or ())
        require(total == rotary // 2, "mrope_section", f"of sum {rotary // 2}, half the rotary dim", mrope_section)
