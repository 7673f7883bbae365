"""Races the contenders of one problem: which of them may take part, and how long each takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseplug_tools.bench import spread

from .aims import Aim
from .gates import Gate
from .problems import EAGER, Contender, Kind, Least, LeftOut, Op, Problem
from .timing import Samples
from .turns import Entry, Turn

Clock = Callable[[Mapping[str, Turn], float], Samples]

_SECONDS = 0.6
"""Seconds for all contenders of one work together. Each contender has its fewest turns in any case."""


@dataclass(frozen=True)
class Result:
    """The result of one contender: microseconds, as `spread` returns them."""

    op: str
    shape: str
    work: str
    contender: str
    microseconds: Mapping[str, float]
    least: Least | None = None
    aim: Aim | None = None

    @property
    def median(self) -> float:
        return self.microseconds["median"]


@dataclass(frozen=True)
class Out:
    """A contender that was not timed. `fault` says whether it is to blame: it is installed, but wrong or failing."""

    op: str
    shape: str
    contender: str
    why: str
    fault: bool = False


def race(op: Op, shape: Any, kind: Kind, clock: Clock, works: Sequence[str]) -> tuple[list[Result], list[Out]]:
    """Time the contenders that are right on *op* at *shape*.

    Raises:
        torch.OutOfMemoryError: If the truth does not fit into memory.
    """
    torch.manual_seed(0)
    torch.compiler.reset()
    problem = op.problem(shape, kind)
    entries, out = admitted(op.name, problem, op.contenders)
    timed = []
    for work in works:
        samples = clock({entry.name: entry.turn(work) for entry in entries}, _SECONDS)
        least = problem.least[work]
        timed += results(op.name, problem.shape, work, samples, least, op.aim(shape, work, least))
    return timed, out


def admitted(op: str, problem: Problem, contenders: Iterable[Contender]) -> tuple[list[Entry], list[Out]]:
    """The contenders that are installed and right, and the others."""
    everybody = list(contenders)
    gate = Gate(problem, Entry(next(c for c in everybody if c.name == EAGER), problem))
    entries, out = [], []
    for contender in everybody:
        try:
            entry = Entry(contender, problem)
            fault = gate.fault(entry)
        except Exception as error:  # a peer may raise anything
            out.append(why_not(op, problem.shape, contender.name, error))
        else:
            if fault:
                out.append(Out(op, problem.shape, contender.name, f"wrong: {fault}", fault=True))
            else:
                entries.append(entry)
    return entries, out


def why_not(op: str, shape: str, contender: str, error: Exception) -> Out:
    """The record of a contender that raised *error* before it was timed."""
    if isinstance(error, ImportError):
        return Out(op, shape, contender, f"absent: {error}")
    if isinstance(error, LeftOut):
        return Out(op, shape, contender, str(error))
    if isinstance(error, torch.OutOfMemoryError):
        return Out(op, shape, contender, "out of memory")
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return Out(op, shape, contender, f"fails: {said[:200]}", fault=True)


def results(
    op: str, shape: str, work: str, samples: Samples, least: Least | None = None, aim: Aim | None = None
) -> list[Result]:
    return [Result(op, shape, work, name, spread(times), least, aim) for name, times in samples.items()]
