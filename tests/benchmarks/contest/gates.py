"""Keeps wrong contenders from being timed: checks values and gradients against the op in a wide dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from .problems import Problem, both
from .turns import Entry

_CHUNK = 1 << 26
"""Elements that are compared at once. Float64 copies of a whole tensor would take more memory than the op."""


class Gate:
    """The truth about a problem.

    A contender is right if its error is at most twice the error of *eager*, or at most `Problem.roundings` of the
    largest magnitude in the row or tensor. It must also leave the arguments as they were, unless it has its own copies.
    """

    def __init__(self, problem: Problem, eager: Entry) -> None:
        self._problem = problem
        arguments, upstream = problem.widened()
        self._truth = tuple(tensor.detach() for tensor in both(problem.exact, arguments, upstream))
        self._before = tuple(tensor.detach().clone() for tensor in (*problem.arguments, *problem.upstream))
        self._eager = eager.outcome()

    def fault(self, entry: Entry) -> str:
        """What is wrong with the results of *entry*, or ``""``."""
        found = entry.outcome()
        names = _names(self._problem, len(found))
        for name, ours, theirs, true in zip(names, found, self._eager, self._truth, strict=True):
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                return f"{name} is {ours.dtype} {[*ours.shape]} instead of {theirs.dtype} {[*theirs.shape]}"
            if why := _excess(ours, theirs, true, self._problem):
                return f"{name} is {why}"
        if not all(map(torch.equal, (*self._problem.arguments, *self._problem.upstream), self._before)):
            return "its arguments are overwritten"
        return ""


def _names(problem: Problem, count: int) -> list[str]:
    gradients = [f"the gradient of argument {i}" for i, t in enumerate(problem.arguments) if t.requires_grad]
    return [*(f"result {i}" for i in range(count - len(gradients))), *gradients]


def _excess(found: Tensor, eager: Tensor, true: Tensor, problem: Problem) -> str:
    width = found.shape[-1] if found.dim() > 1 and problem.by_row else found.numel()
    rows = max(1, _CHUNK // width)
    chunks = (tensor.reshape(-1, width).split(rows) for tensor in (found, eager, true))
    for ours, theirs, exact in zip(*chunks, strict=True):
        magnitude = exact.abs().amax(-1, keepdim=True)
        allowed = problem.roundings * torch.finfo(found.dtype).eps * magnitude
        allowed = torch.maximum(allowed, 2 * (theirs.to(exact.dtype) - exact).abs().amax(-1, keepdim=True))
        error = (ours.to(exact.dtype) - exact).abs().nan_to_num(nan=float("inf"))
        over = error - allowed
        if over.max() > 0:
            at = int(over.argmax())
            return f"{error.flatten()[at]:.2g} off, {allowed[at // width, 0]:.2g} allowed"
    return ""
