"""A run ends when it was said to end: what time there is, divided over what is measured."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Budget:
    """So many minutes for *parts*, by weight; what one leaves over goes to those after it."""

    def __init__(self, minutes: float, parts: Mapping[str, float]) -> None:
        self._parts = dict(parts)
        self._end = time.monotonic() + 60 * minutes
        self._until = self._end

    def begin(self, part: str) -> None:
        """From now on the time is that of *part*."""
        left = self._end - time.monotonic()
        share = self._parts[part] / sum(self._parts.values())
        del self._parts[part]
        self._until = time.monotonic() + share * left

    @property
    def over(self) -> bool:
        """Whether the part that has begun has had its time."""
        return time.monotonic() > self._until
