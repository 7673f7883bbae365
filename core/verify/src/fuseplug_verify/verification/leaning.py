"""Tells a bias from roundings: errors that are each small enough, but lean to one side."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SURE = 6.0
"""The sum of errors of random sign exceeds this many standard errors at most once in 30 million times."""


def leaning(
    compared: tuple[Tensor, Tensor, Tensor],
    usual: Tensor | None,
    coarsest: torch.dtype,
    systematic: float,
    by_row: bool,
) -> str:
    """How a result leans to one side of the truth, more than the original and roundings explain; ``""`` if it does not.

    Two means are tested: that of the relative errors, with their signs, and that of the errors. Each is tested for the
    whole tensor, and for each slice along each dimension. docs/tolerances.md derives what is allowed.

    Args:
        compared: The result to judge, that of the original, and the truth: floating-point tensors of one shape.
        usual: Further true values of that shape, whose magnitudes count as well.
        coarsest: The dtype with the largest roundings that takes part.
        systematic: The relative error that arithmetic in float32 may have, always to one side.
        by_row: Whether errors are relative to the usual magnitude of their row, or to that of the whole tensor.
    """
    result, expected, true = compared
    # A vector counts as a column: each of its elements is rounded by itself, and all have one magnitude.
    shape = result.shape if result.dim() > 1 else (result.numel(), 1)
    truth = true.float().reshape(shape)
    ours, theirs = (value.float().reshape(shape) - truth for value in (result, expected))
    if not (ours.sum() + theirs.sum()).isfinite():
        finite = ours.isfinite() & theirs.isfinite()
        ours, theirs, truth = (torch.where(finite, value, 0.0) for value in (ours, theirs, truth))
    sizes = truth if usual is None else truth.abs().maximum(usual.float().reshape(shape).abs().nan_to_num(0.0, 0.0))
    over_row = by_row and result.dim() > 1
    level = torch.linalg.vector_norm(sizes, dim=-1 if over_row else None, keepdim=True)
    level = level / math.sqrt(shape[-1] if over_row else result.numel())
    # Numbers too small for the dtype become zero, all to one side. In rows of zeros, there are no relative errors.
    level = torch.where(level > 0, level.clamp(min=torch.finfo(result.dtype).tiny), torch.inf)
    relative = truth.abs().maximum(level).reciprocal_().copysign_(truth)
    worst, finding = 1.0, ""
    for side, weights, counts in (
        ("large small", relative, torch.linalg.vecdot(relative, truth).unsqueeze(-1)),
        ("high low", level.reciprocal(), (level < torch.inf).expand(*shape[:-1], 1) * float(shape[-1])),
    ):
        weighted, others = weights * ours, weights * theirs
        squares, rows, count = weighted.square(), weighted.sum(-1, keepdim=True), counts.sum()
        for kept in (None, *range(len(shape))):
            slices = 1 if kept is None else shape[kept]
            size = result.numel() // max(1, slices)
            # So few never add up to more than the standard errors; four times as many, only if they lean strongly.
            if size <= _SURE**2 * (1 if kept is None else 4) or (kept is not None and slices == 1):
                continue
            rest = [dim for dim in range(len(shape)) if dim != kept]
            bias, usual_bias, error = (value.sum(rest) * (slices / count) for value in (weighted, others, squares))
            if kept != len(shape) - 1:
                # How much the biases of the rows differ: the numbers of a row may share a rounding.
                bias_of_rows = (rows.sum(rest, keepdim=True) / counts.sum(rest, keepdim=True)).nan_to_num(0.0)
                error = error.maximum((rows - bias_of_rows * counts).square().sum(rest) * (slices / count))
            error = error.mul(slices / count).sqrt()
            columns = 1 if kept == len(shape) - 1 else shape[-1]
            rows_of = size // columns if kept is None or columns == 1 else 1
            shared = _shared(coarsest, rows_of, columns if result.dim() > 1 else size)
            allowed = (shared + systematic + _SURE * error).clamp(min=2 * usual_bias.abs().max().item())
            times = (bias.abs() / allowed).nan_to_num(0.0).flatten()
            at = int(times.argmax())
            if times[at] > worst:
                worst, share, most = times[at].item(), bias.flatten()[at].item(), allowed.flatten()[at].item()
                where = f"{size:,} elements" if kept is None else f"{size:,} elements, number {at} of dimension {kept}"
                finding = (
                    f"is {abs(share):.2%} too {side.split()[share < 0]} on average over {where}; rounding explains at "
                    f"most {most:.2%}"
                )
    return finding


def _shared(dtype: torch.dtype, rows: int, columns: int) -> float:
    """Twice the standard deviation of the mean of roundings to *dtype*, one for each row and one for each column."""
    return torch.finfo(dtype).eps / math.sqrt(3) * math.sqrt(1 / rows + 1 / columns)
