"""The ranks of a distributed run: all fuse the same, or none does; and one of each machine compiles first.

They talk through the store with which they met, and not with collectives: a rank that does not come keeps nobody for
ever, and nothing comes between the collectives of the training.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import distributed

from ..torch_private import default_store

PATIENCE = datetime.timedelta(minutes=10)
"""How long a rank waits for others, which may have to compile."""

_AGREED = b"agreed"


@dataclass
class Ranks:
    """All ranks, as far as one model is concerned.

    Attributes:
        store: What they share; ``None`` for a process that is alone.
        rank: This one.
        size: How many there are.
        key: What is unlike for any other model.
        environ: Where ``LOCAL_RANK`` is read.
        patience: How long others are waited for.
    """

    store: Any
    rank: int = 0
    size: int = 1
    key: str = ""
    environ: Any = field(default_factory=lambda: os.environ)
    patience: datetime.timedelta = PATIENCE

    @classmethod
    def now(cls, number: int) -> Ranks:
        """The ranks there are now. They count their models alike; *number* is that of this one."""
        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
            return cls(None)
        return cls(default_store(), distributed.get_rank(), distributed.get_world_size(), f"fuseplug/{number}")

    @contextlib.contextmanager
    def compiling_first(self) -> Iterator[None]:
        """On local rank 0: do something. On the others of its machine: do it afterwards, with what is kept of it."""
        local = self.environ.get("LOCAL_RANK")
        if self.store is None or local is None:
            yield
            return
        done = f"{self.key}/compiled/{self.environ.get('GROUP_RANK', platform.node())}"
        if local == "0":
            try:
                yield
            finally:
                self.store.set(done, "1")
            return
        with contextlib.suppress(RuntimeError):  # it does not come: then each compiles for itself
            self.store.wait([done], self.patience)
        yield

    def difference(self, rows: Sequence[str]) -> str:
        """How the plans of the ranks differ; ``""`` if they are the same. All ranks get the same answer.

        Args:
            rows: What this rank would do.
        """
        if self.store is None:
            return ""
        # The plan of whoever comes first is what the others compare theirs with.
        mine = json.dumps(rows)
        told = json.dumps([self.rank, mine])
        who, first = json.loads(self.store.compare_set(f"{self.key}/plan", "", told))
        if mine != first:
            self.refuse(_difference(one=who, ones=json.loads(first), other=self.rank, others=rows))
        elif self.store.add(f"{self.key}/alike", 1) == self.size:
            self._decide(_AGREED.decode())
        with contextlib.suppress(RuntimeError):
            self.store.wait([f"{self.key}/verdict"], self.patience)
        waited = f"within {self.patience} not all of {self.size} ranks had a plan for their model {self.key}"
        verdict = self._decide(waited)
        return "" if verdict == _AGREED else verdict.decode()

    def refuse(self, why: str) -> None:
        """Keep all ranks from fusing this model, if they have not agreed yet."""
        if self.store is not None:
            self._decide(why)

    def _decide(self, verdict: str) -> bytes:
        """What was decided first: *verdict*, or what another rank said before."""
        first: bytes = self.store.compare_set(f"{self.key}/verdict", "", verdict)
        return first


def _difference(one: int, ones: Sequence[str], other: int, others: Sequence[str]) -> str:
    one_alone, other_alone = set(ones) - set(others), set(others) - set(ones)
    for rank, unlike, rows in ((one, other, one_alone), (other, one, other_alone)):
        if rows:
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            return f"rank {rank} would fuse {min(rows)}{more}, and rank {unlike} would not"
    return f"rank {one} and rank {other} name the targets in another order"
