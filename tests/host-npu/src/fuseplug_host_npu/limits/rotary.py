"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..machine import machine
from . import sources
from .common import is_contiguous, is_float, is_index, is_not_empty
from .registry import limit, require

_WIDEST, _WIDEST_950 = 896, 1024
_MOST = 1000
_MOST_WITH_GRADIENTS = 1024
_INTERLEAVED = 64
_BLOCK = 32
"""Bytes of a block. Limits depend on whether half a row is a multiple of a block."""
_NARROW = 80

_Layout = tuple[tuple[int, ...], int, int]


def _layouts(x: Sequence[int], half: bool) -> list[_Layout]:
    """The documented shapes of cos for *x*, without the last dim, each with the batch and heads that *x* then has."""
    if len(x) == 3:
        tokens, heads = x[0], x[1]
        return [((tokens, 1), 1, heads), *([((tokens, heads), 1, heads)] if half else [])]
    one, two, three = x[:3]
    in_order: list[_Layout] = [((1, 1, three), one, two), ((1, two, 1), one, three), ((one, 1, 1), two, three)]
    if not half:
        return in_order
    batched: list[_Layout] = [((one, 1, three), one, two), ((one, two, 1), one, three), ((one, two, 1), two, three)]
    return [*in_order, *batched, ((one, two, three), one, two)]


def _refused_in_bnsd(x: Tensor, table: Tensor) -> bool:
    """Whether the tiling of A2 and A3 refuses this call in half mode, with error 561002.

    The tiling infers the layout from the shapes. If the tables have neither the first nor the second dim of x, the
    layout is BNSD, and the tiling refuses calls that were found to be slower than separate operations.
    """
    (one, two, rows), (first, second, third) = x.shape[:3], table.shape[:3]
    if first == one or second == two or (first, second, third) == (1, 1, 1):
        return False
    if x.shape[-1] // 2 * x.element_size() % _BLOCK == 0:
        return one * two > 8 * rows
    rows_of_a_core = -(-rows // machine().vector_cores)
    return x.shape[-1] < _NARROW and 2 * one * two > rows_of_a_core


def _width(name: str, x: Tensor) -> None:
    width = x.shape[-1]
    if machine().is_950:
        even = f"of an even last dim up to {_WIDEST_950}"
        require(width % 2 == 0 and width <= _WIDEST_950, name, even, x, sources.ROTARY_WIDTH)
    else:
        require(width % 2 == 0 and width < _WIDEST, name, f"of an even last dim below {_WIDEST}", x)


@limit("npu_rotary_mul_backward", page=sources.ROTARY_GRADIENT)
def rotary_mul_backward(grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> None:  # noqa: A002
    """The gradient has the shape of the input; cos and sin have full width, in one of its layouts."""
    require(grad.shape == input.shape, "grad", f"of the shape of input {list(input.shape)}", grad)
    is_not_empty("grad", grad)
    _width("grad", grad)
    shapes = [shape for shape, _, _ in _layouts(grad.shape, half=rotary_mode == "half")]
    for name, table in (("r1", r1), ("r2", r2)):
        require(tuple(table.shape[:-1]) in shapes and table.shape[-1] == grad.shape[-1], name, "in a layout", table)


@limit("npu_rotary_mul", page="torch_npu-npu_rotary_mul.md")
def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, rotate: Tensor | None) -> None:  # noqa: A002
    """The tables cos (r1) and sin (r2) have full width, in a layout that fits one of x: BNSD, BSND, SBND or TND."""
    require(input.dim() in (3, 4), "input", "of 3 or 4 dims", input)
    require(rotary_mode in ("half", "interleave"), "rotary_mode", "'half' or 'interleave'", repr(rotary_mode))
    width = input.shape[-1]
    _width("input", input)
    for name, tensor in (("input", input), ("r1", r1), ("r2", r2)):
        is_float(name, tensor)
    require(r1.dim() == input.dim() and r1.shape[-1] == width, "r1", f"of {input.dim()} dims, the last {width}", r1)
    require(r2.shape == r1.shape, "r2", f"of the shape of r1 {list(r1.shape)}", r2)
    layouts = _layouts(input.shape, half=rotary_mode == "half")
    allowed = " or ".join(dict.fromkeys(str([*shape, width]) for shape, _, _ in layouts))
    fitting = [sizes for shape, *sizes in layouts if shape == tuple(r1.shape[:-1])]
    require(bool(fitting), "r1", f"{allowed} in {rotary_mode} mode for input {list(input.shape)}", r1)
    if rotary_mode == "half":
        few = any(batch < _MOST and heads < _MOST for batch, heads in fitting)
        require(few, "input", f"of a batch and heads below {_MOST}", input)
        if input.dim() == 4 and not machine().is_950:
            asked = (
                "of B · N up to 8 · S in the layout BNSD, or of fewer rows where half a row is no multiple of 32 bytes"
            )
            require(not _refused_in_bnsd(input, r1), "input", asked, input, sources.BNSD_SKIP)
    else:
        few = any(batch * heads < _MOST for batch, heads in fitting)
        require(few, "input", f"of batch × heads below {_MOST} in interleave mode", input)
    if r1.requires_grad or r2.requires_grad:
        few = any(batch * heads <= _MOST_WITH_GRADIENTS for batch, heads in fitting)
        require(few, "input", f"of batch × heads up to {_MOST_WITH_GRADIENTS} where r1 or r2 want gradients", input)
    if rotate is not None:
        wanted = any(tensor.requires_grad for tensor in (input, r1, r2))
        require(not wanted, "rotate", "left out where gradients are wanted: it has no backward", rotate)


@limit("npu_interleave_rope", page="torch_npu-npu_interleave_rope.md")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The input is [B, N, S, 64] in half precision; cos and sin have one head."""
    require(x.dim() == 4 and x.shape[-1] == _INTERLEAVED, "x", f"[B, N, S, {_INTERLEAVED}]", x)
    require(x.dtype in (torch.float16, torch.bfloat16), "x", "float16 or bfloat16", x)
    for name, tensor in (("cos", cos), ("sin", sin)):
        shapes = [(x.shape[0], 1, length, _INTERLEAVED) for length in (1, x.shape[2])]
        require(tuple(tensor.shape) in shapes, name, f"of shape {shapes[0]} or {shapes[1]}", tensor)
        require(tensor.dtype == x.dtype, name, f"{x.dtype}, as x is", tensor)
        is_contiguous(name, tensor)
    is_contiguous("x", x)


@limit("npu_apply_rotary_pos_emb", page="torch_npu-apply_rotary_pos_emb.md")
def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str) -> None:
    """Heads of 64 or 128, rotated by halves, in the layouts BSND and TND; cos and sin have one head for each token."""
    require(layout in ("BSND", "TND"), "layout", "'BSND' or 'TND'", repr(layout))
    require(rotary_mode == "half", "rotary_mode", "'half'", repr(rotary_mode))
    is_float("query", query)
    tokens = query.shape[: len(layout) - 2]
    for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        require(tensor.dim() == len(layout), name, f"of the layout {layout}", tensor)
        require(tensor.shape[: len(tokens)] == tokens, name, f"of the tokens {list(tokens)} of query", tensor)
        require(tensor.shape[-1] in (64, 128), name, "of a last dim of 64 or 128", tensor)
        require(tensor.dtype == query.dtype, name, f"{query.dtype}, as query is", tensor)
        is_not_empty(name, tensor)
    for name, tensor in (("cos", cos), ("sin", sin)):
        require(tensor.shape[-2] == 1, name, "of one head", tensor)


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
    """All tensors have one dtype; sizes are multiples of 32 elements, or of 16 in float32."""
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
    require(rotary_mode in ("half", "interleaved"), "rotary_mode", "'half' or 'interleaved'", repr(rotary_mode))
    require(cache_mode in ("default", "interleave"), "cache_mode", "'default' or 'interleave'", repr(cache_mode))
    if positions.dim() == 2:
        total = sum(mrope_section or ())
        require(total == rotary // 2, "mrope_section", f"of sum {rotary // 2}, half the rotary dim", mrope_section)
