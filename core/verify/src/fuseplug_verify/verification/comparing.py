"""Compares the results of two runs: bit for bit, or within a derived tolerance."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import Candidate
from .leaning import leaning
from .outcome import Judge, Outcome, same

_FEW = 1 << 12
"""This many numbers, or fewer, may be too few to tell a small bias from roundings."""


@dataclass(frozen=True)
class Tolerance:
    """How far from the truth a right implementation may be, as a share of the largest true magnitude in a row.

    Attributes:
        roundings: Number of roundings to the dtype of the result.
        working_roundings: Number of roundings to float32 before that.
        by_row: Whether each row is judged by its own magnitude, or every row by that of the whole tensor. Where results
            are sums of parts, the parts of a row may nearly cancel, and the remainder does not show how exactly they
            can be added.
        coarsest: Takes the place of the result's dtype if intermediate results are coarser, as under autocast.
    """

    roundings: float
    working_roundings: float
    by_row: bool = True
    coarsest: torch.dtype | None = None

    @classmethod
    def of(cls, candidate: Candidate) -> Tolerance:
        """The tolerance that *candidate* states."""
        return cls(candidate.roundings, candidate.working_roundings, by_row=candidate.exact)

    @property
    def share_of_float32(self) -> float:
        """The error that roundings to float32 may cause, as a share of a magnitude."""
        return self.working_roundings * torch.finfo(torch.float32).eps

    def share(self, dtype: torch.dtype) -> float:
        """The error that a result of *dtype* may have, as a share of a magnitude."""
        return self.roundings * torch.finfo(self.coarsest or dtype).eps + self.share_of_float32

    def excess(
        self, ours: Outcome, theirs: Outcome, truth: Outcome, usual: Outcome | None = None, *, repeated: bool = False
    ) -> str:
        """Where *ours* is further from the *truth* than the tolerance allows, or is biased; ``""`` if nowhere.

        Twice the error of *theirs* is always allowed. A right implementation that rounds differently passes. A wrong
        one is off by far more, or by less but always to the same side.

        Args:
            ours: The outcome to judge.
            theirs: The outcome of the original.
            truth: The outcome of the reference in float64.
            usual: The truth of another run of the same sizes, whose magnitudes count as well. Where the terms of a true
                gradient cancel, as all terms of a layer norm do for a constant upstream gradient, the remainder does
                not show how large the terms were.
            repeated: Whether rows of the example are copies of each other. Their roundings are copies, too, so a bias
                cannot be judged.
        """
        true = truth.on_cpu()
        other = {} if usual is None else usual.on_cpu()
        coarsest = self.coarsest_of(ours)

        def error(name: str, result: Tensor, expected: Tensor) -> str:
            share, size, exact = self.share(result.dtype), other.get(name), true[name]
            why = _worst(name, result, expected, exact, share, by_row=self.by_row, usual=size)
            if why or exact is None or repeated or coarsest.itemsize > 2:
                return why
            why = leaning((result, expected, exact), size, coarsest, self.share_of_float32, self.by_row)
            return why and f"{name} {why}"

        return ours.judged(theirs, _judging_results(error, ours.written & theirs.written))

    def coarsest_of(self, outcome: Outcome) -> torch.dtype:
        """The dtype with the largest roundings that takes part in *outcome*."""
        dtypes = {value.dtype for value in outcome.values.values() if value is not None and value.is_floating_point()}
        taking_part = dtypes | ({self.coarsest} if self.coarsest else set())
        return max(taking_part, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


@dataclass(frozen=True)
class Few:
    """The results of one run that have few numbers, such as the gradient of a norm's weight for an input of any size.

    Attributes:
        tensors: By name: the result to judge, that of the original, and the truth.
        coarsest: The dtype with the largest roundings that takes part.
    """

    tensors: dict[str, tuple[Tensor, Tensor, Tensor]]
    coarsest: torch.dtype

    @classmethod
    def of(cls, ours: Outcome, theirs: Outcome, truth: Outcome, tolerance: Tolerance) -> Few:
        """The results with few numbers in outcomes that `Tolerance.excess` has compared."""
        small = {
            name: tuple(outcome.values[name].cpu().double() for outcome in (ours, theirs, truth))  # type: ignore[union-attr]
            for name, value in ours.values.items()
            if value is not None and value.is_floating_point() and 0 < value.numel() <= _FEW
            if not name.endswith("afterwards")
        }
        return cls(small, tolerance.coarsest_of(ours))  # type: ignore[arg-type]


def excess_together(runs: Sequence[Few], tolerance: Tolerance) -> str:
    """Where *runs*, taken together, are biased in their results with few numbers; ``""`` if nowhere."""
    coarsest = max((run.coarsest for run in runs), key=lambda dtype: torch.finfo(dtype).eps)
    if coarsest.itemsize > 2:
        return ""
    parts: dict[tuple[str, tuple[int, ...]], list[Sequence[Tensor]]] = {}
    for run in runs:
        for name, compared in run.tensors.items():
            true = compared[-1]
            level = torch.linalg.vector_norm(true) / math.sqrt(true.numel())  # each run has the same weight
            row = true.shape[-1:] if true.dim() > 1 else ()
            parts.setdefault((name, row), []).append([(value / level).reshape(-1, *row) for value in compared])
    for (name, _), parts_of in parts.items():
        result, expected, true = (torch.cat(values) for values in zip(*parts_of, strict=True))
        if why := leaning((result, expected, true), None, coarsest, tolerance.share_of_float32, tolerance.by_row):
            return f"{name} {why}, in {len(parts_of)} examples"
    return ""


def departure(theirs: Outcome, ours: Outcome, truth: Outcome, tolerance: Tolerance) -> str:
    """Where the original, *theirs*, is further from the *truth* than the tolerance allows; ``""`` if nowhere.

    This judges the original itself, for originals that nothing can equal bit for bit. The tolerance is that of the
    coarsest dtype that takes part, because a float32 result of a mixture was computed in it. *ours*, the reference in
    the original's dtypes, must agree in kind: shapes, dtypes, which gradients there are, which numbers are finite, and
    what is left in the inputs.
    """
    true = truth.on_cpu()
    floating = [value.dtype for value in theirs.values.values() if value is not None and value.is_floating_point()]
    share = max(map(tolerance.share, floating), default=0.0)

    def error(name: str, result: Tensor, expected: Tensor) -> str:
        if not torch.equal(result.isfinite(), expected.isfinite()):
            return f"{name} is finite elsewhere than the original's"
        return _worst(name, expected, None, true[name], share, by_row=tolerance.by_row)

    return ours.judged(theirs, _judging_results(error, ours.written & theirs.written))


def _judging_results(error: Judge, written: Collection[str]) -> Judge:
    """*error* where there can be an error: not in integers, nor in inputs afterwards that are not *written* by both."""

    def judge(name: str, result: Tensor, expected: Tensor) -> str:
        if (name in written or not name.endswith("afterwards")) and result.is_floating_point():
            return error(name, result, expected)
        return "" if same(result, expected) else f"{name} differs from what the original writes there"

    return judge


def _worst(
    name: str,
    value: Tensor,
    excuse: Tensor | None,
    true: Tensor | None,
    share: float,
    *,
    by_row: bool,
    usual: Tensor | None = None,
) -> str:
    if true is None:
        return f"{name} has no true value"
    if not value.numel():
        return ""
    width = value.shape[-1] if value.dim() and by_row else value.numel()
    result, true = (t.double().reshape(-1, width) for t in (value, true))
    judged = true.isfinite()
    allowed = zero = torch.zeros((), dtype=torch.float64)
    if excuse is not None:
        expected = excuse.double().reshape(-1, width)
        # Where the original itself overflows its dtype, a kernel cannot be judged.
        judged = judged & expected.isfinite()
        allowed = 2 * torch.where(judged, (expected - true).abs(), zero).amax(-1, keepdim=True)
    size = true.abs() if usual is None else torch.maximum(true.abs(), usual.double().reshape(-1, width).abs())
    scale = torch.where(judged, size, zero).amax(-1, keepdim=True)
    allowed = torch.maximum(allowed, share * scale)
    error = torch.where(judged, (result - true).abs(), zero).nan_to_num(nan=float("inf"))
    over = error - allowed
    at = int(over.argmax())
    if over.flatten()[at] <= 0:
        return ""
    row = at // width
    magnitude = f"row of magnitude {scale[row, 0]:.3g}"
    return f"{name} is off by {error.flatten()[at]:.3g} where {allowed[row, 0]:.3g} is allowed ({magnitude})"
