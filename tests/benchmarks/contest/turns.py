"""What a clock times: one call of one contender, after an untimed preparation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .problems import BACKWARD, FORWARD, Contender, Function, Problem, backward, both, forward, results


class Turn(NamedTuple):
    """A call to time. `prepare` is not timed, and returns the argument of `run`."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]


class Entry:
    """A contender with its function for a problem, and with arguments of its own if it overwrites them."""

    def __init__(self, contender: Contender, problem: Problem) -> None:
        self.name = contender.name
        self._problem = problem
        self._given = (*problem.arguments, *problem.upstream) if contender.writes else ()
        self._own = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in self._given)
        count = len(problem.arguments)
        self.arguments = self._own[:count] if contender.writes else problem.arguments
        self.upstream = self._own[count:] if contender.writes else problem.upstream
        self.function: Function = contender.make(self.arguments)

    def restore(self) -> None:
        """Undo what the contender did to its own arguments."""
        with torch.no_grad():
            for own, given in zip(self._own, self._given, strict=True):
                own.copy_(given)

    def outcome(self) -> tuple[Tensor, ...]:
        """Copies of the results and the gradients."""
        self.restore()
        return tuple(tensor.clone() for tensor in both(self.function, self.arguments, self.upstream))

    def turn(self, work: str) -> Turn:
        """The turn that times *work*."""
        if work == FORWARD:
            return Turn(self.restore, lambda _: forward(self.function, self.arguments))
        if work == BACKWARD:
            return Turn(self._ahead, lambda out: backward(out, self.arguments, self.upstream))
        return Turn(self.restore, lambda _: both(self.function, self.arguments, self.upstream))

    def _ahead(self) -> tuple[Tensor, ...]:
        self.restore()
        return results(self.function(*self.arguments))
