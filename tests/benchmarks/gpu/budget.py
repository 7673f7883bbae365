"""Divides the time of a run among its parts, so that the run ends on time."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Budget:
    """Divides *minutes* among *parts* by weight. Time that a part leaves over goes to the parts after it."""

    def __init__(self, minutes: float, parts: Mapping[str, float]) -> None:
        self._parts = dict(parts)
        self._end = time.monotonic() + 60 * minutes
        self._until = self._end

    def begin(self, part: str) -> None:
        """Start the time of *part*."""
        left = self._end - time.monotonic()
        share = self._parts[part] / sum(self._parts.values())
        del self._parts[part]
        self._until = time.monotonic() + share * left

    @property
    def over(self) -> bool:
        """Whether the time of the current part is over."""
        return time.monotonic() > self._until
