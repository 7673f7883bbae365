"""Counts the calls of a replacement, by who computed them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..functional import this_thread

DECLINED = "the kernel's function leaves it to its reference"


@dataclass(slots=True)
class Count:
    """Calls of one site.

    Attributes:
        fused: Those that the kernel computed.
        original: Those that the original did, or PyTorch, where the kernel's function declined.
        made_real: Of those that the kernel computed, by what needed the values of a lazy result, how many.
    """

    fused: int = 0
    original: int = 0
    made_real: dict[str, int] = field(default_factory=dict)

    def real(self, why: str) -> None:
        """Count a lazy result that *why* needed the values of."""
        self.made_real[why] = self.made_real.get(why, 0) + 1


Listener = Callable[[Count, Callable[[], str]], None]
"""``heard(count, why)``: told of every call that goes to an original, by where it is counted; ``why()`` finds the
reason, which takes much longer than the call."""

listeners: list[Listener] = []
"""Who is told of the calls that originals compute: `listening` adds to it."""


@dataclass
class Tally:
    """The calls of one replacement, by module; calls of a replaced function are counted together.

    A module is identified by its id. A reference would keep it alive, and its hash may run its code.

    Attributes:
        counts: The calls, by the number of their module.
        traced: Whether a call was traced. What a compiled program calls is not counted.
    """

    counts: dict[int, Count] = field(default_factory=dict)
    traced: bool = False

    def fused(self, module: Any) -> None:
        """Count a call that the kernel computed, unless its function left it to its reference."""
        if this_thread.declined:
            this_thread.declined = False
            count = self.original(module)
            if listeners:
                tell(count, lambda: DECLINED)
            return
        try:
            self.counts[id(module)].fused += 1
        except KeyError:
            self.of(module).fused += 1

    def original(self, module: Any) -> Count:
        """Count a call that the original computes."""
        try:
            count = self.counts[id(module)]
        except KeyError:
            count = self.of(module)
        count.original += 1
        return count

    def of(self, module: Any) -> Count:
        """The calls on *module*."""
        return self.counts.setdefault(id(module), Count())

    def forget(self, module: Any) -> None:
        """Reset the count of *module*, because an earlier module may have had the same id."""
        self.counts.pop(id(module), None)


def tell(count: Count, why: Callable[[], str]) -> None:
    """Tell `listeners` of a call that an original computes."""
    for heard in tuple(listeners):  # one that has heard enough leaves
        heard(count, why)


@contextlib.contextmanager
def listening(heard: Listener) -> Iterator[None]:
    """Call *heard* for each call that an original computes inside the block."""
    listeners.append(heard)
    try:
        yield
    finally:
        listeners.remove(heard)
