"""The calls in which an original agreed with a variant: their arguments, numbers of dimensions, and dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ..data import Example
from ..reading.lookup import attribute
from ..subjects import Subject
from ..watch import Call, Dtypes, kind_of
from .varying import Variation

Likeness = Literal["same", "differs", "unanswered"]


@dataclass
class Tried:
    """The results of varied calls.

    Attributes:
        ranks: The numbers of dimensions for which original and reference agree.
        varied: The numbers of dimensions that were tried.
        nonempty: Whether they agree only on inputs with elements.
        no_autocast: Whether they agree only without autocast.
    """

    ranks: set[int]
    varied: set[int] = field(default_factory=set)
    nonempty: bool = False
    no_autocast: bool = False

    def note(self, variation: Variation, answer: Likeness) -> None:
        """Note the *answer* to a *variation*."""
        if variation.kind == "rank":
            self.varied.add(variation.rank)
            self.ranks |= {variation.rank} if answer == "same" else set()
        self.nonempty |= variation.kind == "empty" and answer != "same"
        self.no_autocast |= variation.kind == "autocast" and answer != "same"

    def accepted(self, seen: frozenset[int]) -> frozenset[int]:
        """The numbers of dimensions allowed for a tensor that had *seen* in the examples; empty if all are."""
        if not self.varied:
            return seen
        return frozenset() if self.varied <= self.ranks else seen | self.ranks


def calls_of(examples: Sequence[Example], bound: bool, tried: Tried) -> Iterator[Call]:
    """The ways in which *examples* are called, each once."""
    ways: dict[tuple[int, tuple[str, ...]], list[list[Any]]] = {}
    for example in examples:
        ways.setdefault((bound + len(example.args), tuple(example.kwargs)), []).append(arguments_of(example))
    for (count, names), rows in ways.items():
        columns = list(zip(*rows, strict=True))
        kinds = [frozenset(map(kind_of, column)) for column in columns]
        several = [map(kind_of, column) for column, each in zip(columns, kinds, strict=True) if len(each) > 1]
        together = frozenset(zip(*several, strict=True))
        if len(together) == math.prod(map(len, kinds)):
            together = frozenset()
        ranks = [frozenset(value.dim() for value in column if isinstance(value, Tensor)) for column in columns]
        none: list[frozenset[Any]] = [frozenset()] * bound
        # Ranks are varied only where all arguments have the same rank.
        every = [tried.accepted(seen) if seen else seen for seen in ranks]
        yield Call(count, names, (*none, *kinds), (*none, *every), together)


def arguments_of(example: Example) -> list[Any]:
    """All arguments of a call, those by position first."""
    return [*example.args, *example.kwargs.values()]


def dtypes_in(typed: Sequence[int | str], example: Example, subject: Subject) -> Dtypes:
    """The dtypes in *example* of the tensors *typed*, as in `VerifiedCalls`; ``None`` for one that is not given."""
    arguments = [*([None] if subject.module is not None else []), *arguments_of(example)]

    def tensor(at: int | str) -> Any:
        if isinstance(at, int):
            return arguments[at]
        return example.parameters[at] if at in example.parameters else attribute(subject.module, at)

    return tuple(getattr(tensor(at), "dtype", None) for at in typed)
