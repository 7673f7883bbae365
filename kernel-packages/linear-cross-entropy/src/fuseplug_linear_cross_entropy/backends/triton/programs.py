"""The programs on the GPU. Each handles the logits of one token, a row of adjacent memory.

They compute in float32, for a logit *z* with the steps folded (see `folded`), ``V`` words and the label ``l``:

    y = outer · z, or outer · tanh(inner · z)
    lse = log Σ exp y,  log p = y − lse,  H = −Σ p · log p
    value = picked · log p_l + spread · mean(log p)

    dz_j = (u · picked · (1[j = l] − p_j) + (u · spread + m) · (1/V − p_j) − e · p_j · (log p_j + H)
            + a · p_j + b · p_j²) · dy/dz

where u is the gradient of the value, e that of H, and m that of mean(log p); a and b are the further factors of p and
p² in `recorded`. The formulas of the other results are in `reference.STATISTICS`. One pass reads the logits for lse,
value and H: each lane keeps the largest of its own logits, and sums relative to it. A second pass puts dz in their
place. It begins with the last tile, because that was read last and is in the cache.

All results and gradients of a token with the label *ignore_index* are 0; its logits are not read. A label outside of
the vocabulary makes the results and gradients of its token NaN, except that is_top1 is 0, and the entropy, which does
not depend on the label, stays as it is.

Rows lie *stride* elements apart, of which the first *width* are logits. The others are read and written, too, so that
memory is moved by 16 bytes for any vocabulary, but they do not count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fuseplug_backends.triton import cached_launches

_LOWEST = tl.constexpr(-3.4028234e38)
"""A number below every logit. It is finite, so differences from it are not NaN."""


@cached_launches
@triton.jit(do_not_specialize=["width", "ignore_index"])
def measure(
    logits,
    labels,
    value,
    lse,
    mean,
    entropy,
    logsumexp,
    mean_logits,
    squares,
    top1,
    width,
    stride,
    ignore_index,
    picked,
    spread,
    inner,
    outer,
    CAPPED: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write *value*, *lse*, and those of the other results that are not None."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label == ignore_index:
        _store(value, lse, mean, entropy, logsumexp, mean_logits, squares, top1, row, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    else:
        of_value, of_lse, of_mean, of_entropy, of_logits, of_squares, of_top1 = _measured(
            logits + row * stride, label, width, stride, picked, spread, inner, outer, CAPPED, SPREAD,
            entropy is not None, mean_logits is not None, squares is not None, top1 is not None, BLOCK,
        )  # fmt: skip
        _store(
            value, lse, mean, entropy, logsumexp, mean_logits, squares, top1, row,
            of_value, of_lse, of_mean, of_entropy, of_logits, of_squares, of_top1,
        )  # fmt: skip


@cached_launches
@triton.jit(do_not_specialize=["width", "ignore_index", "upstream_stride", "of_entropy_stride", "of_mean_stride"])
def differentiate(
    logits,
    gradient,
    labels,
    lse,
    entropy,
    upstream,
    of_entropy,
    of_mean,
    of_p,
    of_square,
    upstream_stride,
    of_entropy_stride,
    of_mean_stride,
    width,
    stride,
    ignore_index,
    picked,
    spread,
    inner,
    outer,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the *gradient* of *logits*, possibly over them, for *upstream* and those other gradients that are given."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    logits += row * stride
    gradient += row * stride
    if label == ignore_index:
        _clear(gradient, stride, BLOCK)
    else:
        u = tl.load(upstream + row * upstream_stride)
        e, known_entropy = 0.0, 0.0
        if of_entropy is not None:
            e = tl.load(of_entropy + row * of_entropy_stride)
            known_entropy = tl.load(entropy + row)
        s = u * spread
        if of_mean is not None:
            s += tl.load(of_mean + row * of_mean_stride)
        a, b = 0.0, 0.0
        if of_p is not None:
            a = tl.load(of_p + row)
        if of_square is not None:
            b = tl.load(of_square + row)
        _differentiate(
            logits, gradient, label, tl.load(lse + row), known_entropy, u * picked, s, e, a, b, width, stride, inner,
            outer, CAPPED, of_entropy is not None, of_p is not None, BLOCK,
        )  # fmt: skip


@cached_launches
@triton.jit(do_not_specialize=["width", "ignore_index", "upstream_stride"])
def measure_and_differentiate(
    logits,
    labels,
    value,
    upstream,
    upstream_stride,
    width,
    stride,
    ignore_index,
    picked,
    spread,
    inner,
    outer,
    CAPPED: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write *value*, and put the gradient for *upstream* in the place of *logits*."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    logits += row * stride
    if label == ignore_index:
        tl.store(value + row, 0.0)
        _clear(logits, stride, BLOCK)
    else:
        of_value, lse, _, _, _, _, _ = _measured(
            logits, label, width, stride, picked, spread, inner, outer, CAPPED, SPREAD, False, False, False, False,
            BLOCK,
        )  # fmt: skip
        tl.store(value + row, of_value)
        u = tl.load(upstream + row * upstream_stride)
        _differentiate(
            logits, logits, label, lse, 0.0, u * picked, u * spread, 0.0, 0.0, 0.0, width, stride, inner, outer, CAPPED,
            False, False, BLOCK,
        )  # fmt: skip


@cached_launches
@triton.jit
def scale(gradient, factor, result, size, BLOCK: tl.constexpr):
    """Write *gradient* times *factor*, one number in memory, as *result*; each ``(size,)``, computed in float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    scaled = tl.load(gradient + at, mask=inside).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(result + at, scaled, mask=inside)


@triton.jit
def _store(
    value, lse, mean, entropy, logsumexp, mean_logits, squares, top1, row,
    of_value, of_lse, of_mean, of_entropy, of_logits, of_squares, of_top1,
):  # fmt: skip
    """Write the numbers of one token into the results that are not None."""
    tl.store(value + row, of_value)
    tl.store(lse + row, of_lse)
    if mean is not None:
        tl.store(mean + row, of_mean)
    if entropy is not None:
        tl.store(entropy + row, of_entropy)
    if logsumexp is not None:
        tl.store(logsumexp + row, of_lse)
    if mean_logits is not None:
        tl.store(mean_logits + row, of_logits)
    if squares is not None:
        tl.store(squares + row, of_squares)
    if top1 is not None:
        tl.store(top1 + row, of_top1)


@triton.jit
def _measured(
    logits,
    label,
    width,
    stride,
    picked,
    spread,
    inner,
    outer,
    CAPPED: tl.constexpr,
    SPREAD: tl.constexpr,
    ENTROPY: tl.constexpr,
    MEAN_LOGITS: tl.constexpr,
    SQUARES: tl.constexpr,
    TOP1: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Value, lse, mean, entropy, mean_logits, log_sum_sq_probs and is_top1 of one token."""
    # Loaded before the sums, for which all threads wait: code after them may overwrite the logits.
    is_word = (label >= 0) & (label < width)
    of_label = _stepped(tl.load(logits + label, mask=is_word, other=float("nan")), inner, outer, CAPPED)[0]
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)  # of exp(y - top)
    moment = tl.zeros((BLOCK,), tl.float32)  # of exp(y - top) (y - top), which does not cancel as lse - Σ p y does
    plain = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)  # of exp(y - top)²
    before = tl.full((BLOCK,), _LOWEST, tl.float32)  # the largest of the words before the label
    for first in range(0, stride, BLOCK):
        at = first + lane
        y = _stepped(tl.load(logits + at, mask=at < stride, other=0.0), inner, outer, CAPPED)[0]
        if SPREAD or MEAN_LOGITS:
            plain += tl.where(at < width, y, 0.0)
        if TOP1:
            before = tl.maximum(before, tl.where(at < label, y, _LOWEST))
        y = tl.where(at < width, y, -float("inf"))
        above = y - top
        factor = tl.exp(-tl.abs(above))
        if ENTROPY:
            kept = moment + factor * tl.maximum(above, _LOWEST)  # 0 times infinity would be NaN
            moment = tl.where(above > 0, factor * (moment - above * total), kept)
        if SQUARES:
            square = tl.where(above > 0, square * factor * factor + 1.0, square + factor * factor)
        total = tl.where(above > 0, total * factor + 1.0, total + factor)
        top = tl.maximum(top, y)
    most = tl.max(top, 0)
    below = tl.maximum(top - most, _LOWEST)
    factor = tl.exp(below)
    total_of_row = tl.sum(factor * total, 0)
    log_total = tl.log(total_of_row)
    entropy = 0.0
    if ENTROPY:
        entropy = log_total - tl.sum(factor * (moment + below * total), 0) / total_of_row
    lse = tl.where(is_word, most + log_total, float("nan"))
    value = picked * (of_label - lse)
    mean_logits, log_square = 0.0, 0.0
    if MEAN_LOGITS:
        mean_logits = tl.where(is_word, tl.sum(plain, 0) / width, float("nan"))
    if SQUARES:
        log_square = tl.log(tl.sum(factor * factor * square, 0)) - 2.0 * log_total
        log_square = tl.where(is_word, log_square, float("nan"))
    top1 = tl.where(is_word & (of_label >= most) & (of_label > tl.max(before, 0)), 1.0, 0.0)
    mean = 0.0
    if SPREAD:
        mean = tl.sum(plain, 0) / width - lse
        value += tl.where(spread == 0.0, 0.0, spread * mean)  # 0 times infinity would be NaN
    return value, lse, mean, entropy, mean_logits, log_square, top1


@triton.jit
def _differentiate(
    logits,
    gradient,
    label,
    lse,
    entropy,
    of_label,
    s,
    e,
    a,
    b,
    width,
    stride,
    inner,
    outer,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the *gradient* of one token's logits. *of_label* is u · picked, *s* u · spread + m. MORE adds a and b."""
    lane = tl.arange(0, BLOCK)
    tiles = tl.cdiv(stride, BLOCK)
    even = s / width
    for tile in range(tiles):
        at = (tiles - 1 - tile) * BLOCK + lane
        y, slope = _stepped(tl.load(logits + at, mask=at < stride, other=0.0), inner, outer, CAPPED)
        logp = y - lse
        p = tl.exp(logp)
        grad = tl.where(at == label, of_label, 0.0) - of_label * p + even - s * p
        if ENTROPY:
            grad -= e * p * (tl.maximum(logp, _LOWEST) + entropy)
        if MORE:
            grad += p * (a + b * p)
        tl.store(gradient + at, grad * slope, mask=at < stride)


@triton.jit
def _clear(gradient, stride, BLOCK: tl.constexpr):
    for first in range(0, stride, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(gradient + at, tl.zeros((BLOCK,), tl.float32), mask=at < stride)


@triton.jit
def _stepped(z, inner, outer, CAPPED: tl.constexpr):
    """The logits after the steps, and their derivative with respect to *z*."""
    z = z.to(tl.float32)
    if CAPPED:
        x = inner * z
        # Near 0, 1 − 2 / (e²ˣ + 1) cancels, and the series is exact to float32.
        square = x * x
        series = 1.0 + square * (
            -0.3333333333333333
            + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203))
        )
        tanh = tl.where(tl.abs(x) < 0.3, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
        y = outer * tanh
        slope = inner * outer * (1.0 - tanh * tanh)
    else:
        y = outer * z
        slope = outer
    return y, slope
