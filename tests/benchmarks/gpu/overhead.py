"""Times what a call costs the host, at one token, where only this counts. No CUDA graph."""

from __future__ import annotations

from typing import Any

import torch

from ..contest.aims import CALL
from ..contest.problems import BOTH, FORWARD, Kind, Op
from ..contest.race import Clock, Out, Result, admitted, results


def overhead(op: Op, shape: Any, kind: Kind, clock: Clock) -> tuple[list[Result], list[Out]]:
    """Measure the host's time for each contender of *op*; for ours, also as a model calls it."""
    torch.manual_seed(0)
    torch.compiler.reset()
    problem = op.problem(shape, kind)
    entries, out = admitted(op.name, problem, (*op.contenders, op.applied))
    timed: list[Result] = []
    for work in (FORWARD, BOTH):
        samples = clock({entry.name: entry.turn(work) for entry in entries}, 0.0)
        timed += results(op.name, problem.shape, work, samples, aim=CALL)
    return timed, out
