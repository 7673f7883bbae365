"""The programs on the GPU: RMSNorm forward, backward, and the sum of the rows that the backward's programs leave.

All of them compute the following in float32, for each row (or group) of *n* elements. ``c`` is the weight, or 1 + w,
and ``a`` the activated gate, 1 if there is none:

    u = x        or  x · a, x · c  if these come before the norm
    r = 1 / sqrt(mean(u²) + eps)
    y = u · r · p,  p = c · a  of those that come after the norm

    du = r · (dy · p − u · r · mean(dy · p · u · r))
    dc = Σ dy · a · u · r  after the norm, Σ du · x  before it
    da = dy · c · u · r    after the norm, du · x    before it

The tile of a program has ROWS rows of WIDTH elements, in BLOCK columns. The second axis of the grid is that of the
groups, so a program needs only one stretch of the weight. Rows of results lie WIDTH × groups apart.
"""
# ruff: noqa: C901 - most branches are decided when Triton compiles

from __future__ import annotations

import triton
import triton.language as tl

from fuseplug_backends.triton import cached_launches


@triton.jit
def _scale(weight, first, column, WIDTH: tl.constexpr, OFFSET: tl.constexpr):
    """The factor of unit rows, in float32."""
    scale = tl.load(weight + first + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if OFFSET:
        scale += 1.0
    return scale


@triton.jit
def _activate(gate, SIGMOID: tl.constexpr):
    factor = tl.sigmoid(gate)
    return factor if SIGMOID else gate * factor


@triton.jit
def _slope(gate, SIGMOID: tl.constexpr):
    """The derivative of `_activate`."""
    factor = tl.sigmoid(gate)
    return factor * (1.0 - factor) if SIGMOID else factor * (1.0 + gate * (1.0 - factor))


@cached_launches
@triton.jit(do_not_specialize=["tokens"])
def forward(
    y,
    total,
    rstd,
    x,
    residual,
    weight,
    gate,
    x_stride,
    residual_stride,
    gate_stride,
    tokens,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Write *y*, and *total* and *rstd* unless they are None. Without *residual*, there is no *total*."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    first = group * WIDTH
    column = tl.arange(0, BLOCK)[None, :]
    # In 64 bits: a tensor may have more than 2³¹ elements.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    inside = (row < tokens) & (column < WIDTH)
    result = row * (groups * WIDTH) + first + column

    u = tl.load(x + row * x_stride + first + column, mask=inside, other=0.0)
    if residual is not None:
        u = u.to(tl.float32) + tl.load(residual + row * residual_stride + first + column, mask=inside, other=0.0)
        u = u.to(total.dtype.element_ty)
        tl.store(total + result, u, mask=inside)
    u = u.to(tl.float32)
    if gate is not None:
        factor = tl.load(gate + row * gate_stride + first + column, mask=inside, other=0.0).to(tl.float32)
        factor = _activate(factor, SIGMOID)
        if GATE_FIRST:
            u *= factor
    if weight is not None:
        scale = _scale(weight, first, column, WIDTH, OFFSET)
        if WEIGHT_FIRST:
            u *= scale
    r = tl.rsqrt(tl.sum(u * u, axis=1, keep_dims=True) / WIDTH + eps)
    if rstd is not None:
        tl.store(rstd + row * groups + group, r, mask=row < tokens)
    u *= r
    if weight is not None and not WEIGHT_FIRST:
        u *= scale
    if gate is not None and not GATE_FIRST:
        u *= factor
    tl.store(y + result, u, mask=inside)


@cached_launches
@triton.jit(do_not_specialize=["tokens"])
def backward(
    dx,
    dgate,
    dweight,
    dy,
    dtotal,
    x,
    weight,
    gate,
    rstd,
    dy_stride,
    dtotal_stride,
    x_stride,
    gate_stride,
    tokens,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write *dx*, *dgate* and *dweight* unless they are None, the last as one row for each program of the first axis.

    *dtotal*, unless it is None, is added to *dx*.
    """
    group, groups = tl.program_id(1), tl.num_programs(1)
    first = group * WIDTH
    column = tl.arange(0, BLOCK)[None, :]
    if weight is not None and BLOCK <= 8192:
        scale = _scale(weight, first, column, WIDTH, OFFSET)
    if dweight is not None:
        dscale = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (row < tokens) & (column < WIDTH)
        result = row * (groups * WIDTH) + first + column

        if weight is not None and BLOCK > 8192:
            scale = _scale(weight, first, column, WIDTH, OFFSET)
        source = tl.load(x + row * x_stride + first + column, mask=inside, other=0.0).to(tl.float32)
        du = tl.load(dy + row * dy_stride + first + column, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row * groups + group, mask=row < tokens, other=0.0)
        u = source
        if gate is not None:
            raw = tl.load(gate + row * gate_stride + first + column, mask=inside, other=0.0).to(tl.float32)
            factor = _activate(raw, SIGMOID)
            if GATE_FIRST:
                u *= factor
        if weight is not None and WEIGHT_FIRST:
            u *= scale
        u *= r

        if gate is not None and not GATE_FIRST:
            if dgate is not None:
                slope = du * u * _slope(raw, SIGMOID)
                if weight is not None and not WEIGHT_FIRST:
                    slope *= scale
                tl.store(dgate + result, slope, mask=inside)
            du *= factor
        if weight is not None and not WEIGHT_FIRST:
            if dweight is not None:
                dscale += du * u
            du *= scale

        du = r * (du - u * (tl.sum(du * u, axis=1, keep_dims=True) / WIDTH))

        if weight is not None and WEIGHT_FIRST:
            if dweight is not None:
                dscale += du * source
            du *= scale
        if gate is not None and GATE_FIRST:
            if dgate is not None:
                tl.store(dgate + result, du * source * _slope(raw, SIGMOID), mask=inside)
            du *= factor
        if dtotal is not None:
            du += tl.load(dtotal + row * dtotal_stride + first + column, mask=inside, other=0.0)
        if dx is not None:
            tl.store(dx + result, du, mask=inside)
    if dweight is not None:
        at = tl.program_id(0) * (groups * WIDTH) + first + column
        tl.store(dweight + at, tl.sum(dscale, axis=0, keep_dims=True), mask=column < WIDTH)


@cached_launches
@triton.jit(do_not_specialize=["parts"])
def add_up(result, partial, parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of the *parts* rows of *partial*, always in the same order."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(partial + row * width + column, mask=(row < parts) & (column < width), other=0.0)
    tl.store(result + column, tl.sum(sums, axis=0, keep_dims=True), mask=column < width)
