"""Finds the answers that differ from earlier ones, to judge a change of what is recognised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .collect import Answer


class Change(NamedTuple):
    """One class or function whose answer has changed."""

    before: Answer
    now: Answer

    @property
    def lost(self) -> bool:
        """Whether it was fused and no longer is."""
        return self.before.how == "fused" != self.now.how

    def __str__(self) -> str:
        before, now = (f"{a.how} ({'; '.join(a.variants)})" if a.variants else a.how for a in self)
        where = f"{self.now.op} {self.now.folder}.{self.now.name}"
        return f"{'LOST ' if self.lost else ''}{where}: was {before}, is {now}"


def changes(before: Iterable[Answer], now: Sequence[Answer]) -> Iterator[Change]:
    """The answers of *now* that differ from *before*, in whether something is fused or in its variants."""
    old = {(answer.op, answer.folder, answer.name): answer for answer in before}
    for answer in now:
        key = answer.op, answer.folder, answer.name
        was = old.get(key) or Answer(*key, "not in the census")
        if was.how != answer.how or (answer.how == "fused" and tuple(was.variants) != answer.variants):
            yield Change(was, answer)


def fused_of_each_op(answers: Sequence[Answer]) -> Iterator[str]:
    """A line for each op: how many of its classes are fused."""
    for op in dict.fromkeys(answer.op for answer in answers):
        of_op = [answer for answer in answers if answer.op == op]
        yield f"{op}: {sum(answer.how == 'fused' for answer in of_op)} of {len(of_op)} fused"
