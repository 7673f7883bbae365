"""The ranks of a distributed run: all fuse the same targets, or none fuses any. One rank per machine compiles first.

The ranks communicate through the store through which they met, not by collectives. So a missing rank does not block
the others for ever, and nothing comes between the collectives of the training.
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
    """The ranks of a run, for one model.

    Attributes:
        store: The store that the ranks share; ``None`` for a process that is alone.
        rank: The rank of this process.
        size: How many ranks there are.
        key: The beginning of the model's keys in the store, different for each model.
        environ: The environment variables, for ``LOCAL_RANK`` and ``GROUP_RANK``.
        patience: How long to wait for other ranks.
    """

    store: Any
    rank: int = 0
    size: int = 1
    key: str = ""
    environ: Any = field(default_factory=lambda: os.environ)
    patience: datetime.timedelta = PATIENCE

    @classmethod
    def now(cls, number: int) -> Ranks:
        """The current ranks. *number* is the model's number; all ranks number their models in the same order."""
        if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
            return cls(None)
        return cls(default_store(), distributed.get_rank(), distributed.get_world_size(), f"fuseplug/{number}")

    @contextlib.contextmanager
    def compiling_first(self) -> Iterator[None]:
        """Run the block on local rank 0 first. The other ranks of its machine run it later, and reuse what it kept."""
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
        with contextlib.suppress(RuntimeError):  # it takes too long: then each rank compiles for itself
            self.store.wait([done], self.patience)
        yield

    def difference(self, rows: Sequence[str]) -> str:
        """How the plans of the ranks differ; ``""`` if they are the same. All ranks get the same answer.

        Args:
            rows: The rows of this rank's plan.
        """
        if self.store is None:
            return ""
        # The first rank stores its plan; the others compare theirs with it.
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
        """The verdict that was stored first: *verdict*, or that of another rank."""
        first: bytes = self.store.compare_set(f"{self.key}/verdict", "", verdict)
        return first


def _difference(one: int, ones: Sequence[str], other: int, others: Sequence[str]) -> str:
    one_alone, other_alone = set(ones) - set(others), set(others) - set(ones)
    for rank, unlike, rows in ((one, other, one_alone), (other, one, other_alone)):
        if rows:
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            return f"rank {rank} would fuse {min(rows)}{more}, and rank {unlike} would not"
    return f"rank {one} and rank {other} name the targets in another order"
