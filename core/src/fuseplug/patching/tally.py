"""Counts the calls of a replacement, by who computed them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..fallback import this_thread

DECLINED = "the kernel's function leaves it to its reference"

ENOUGH = 10
"""After how many calls of a target it is judged whether its kernel is in use."""

_ASKED = (1, 3, ENOUGH - 1)
"""Which of the refused calls are asked for their reason, which takes much longer than the call."""


class Watcher(Protocol):
    """What wants to know when there were `ENOUGH` calls of a target."""

    def enough(self, pace: Count) -> None:
        """There were, of what *pace* counts."""


@dataclass(slots=True)
class Count:
    """Calls of one target of one module.

    Attributes:
        fused: Those that the kernel computed.
        original: Those that the original did, or PyTorch, where the kernel's function declined.
        made_real: Of those that the kernel computed, by what needed the values of a lazy result, how many.
        reasons: While somebody watches: why the original computed some of the last that it did. Calls that were too
            small have none.
        refused: While somebody watches: how many calls in a row the kernel should have computed and was not let.
        before: How many calls the kernel had computed when the first of these came.
        until: At how many calls of the kernel the watcher is told; 0 for never.
        watcher: Who watches; a weak reference.
        alive: The module; a weak reference that makes room for another with its id.
    """

    fused: int = 0
    original: int = 0
    made_real: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, None] = field(default_factory=dict)
    refused: int = 0
    before: int = 0
    until: int = 0
    watcher: weakref.ref[Watcher] | None = None
    alive: weakref.ref[Any] | None = None

    def real(self, why: str) -> None:
        """Count a lazy result that *why* needed the values of."""
        self.made_real[why] = self.made_real.get(why, 0) + 1

    def watched_by(self, watcher: Watcher) -> None:
        """Tell *watcher* of the next `ENOUGH` calls of the kernel, and of as many refused in a row."""
        self.watcher, self.until = weakref.ref(watcher), self.fused + ENOUGH
        self.reasons, self.refused, self.before = {}, 0, self.fused

    def unwatched(self) -> None:
        """Tell nobody anything any more."""
        self.watcher, self.until = None, 0

    def reached(self) -> None:
        """Note that the kernel has computed as many calls as the watcher waits for."""
        self.until *= 2
        self._tell()

    def refuse(self, why: Callable[[], str]) -> None:
        """Note a call that the kernel was not let compute; *why* finds the reason."""
        if self.fused != self.before:
            self.reasons, self.refused, self.before = {}, 0, self.fused
        self.refused += 1
        if self.refused in _ASKED:
            self.reasons[why()] = None
        if self.refused % ENOUGH == 0:
            self._tell()

    def _tell(self) -> None:
        watcher = None if self.watcher is None else self.watcher()
        if watcher is not None:
            watcher.enough(self)


Listener = Callable[[Count, Callable[[], str]], None]
"""``heard(count, why)``: told of every call that goes to an original, by where it is counted; ``why()`` finds the
reason, which takes much longer than the call."""

listeners: list[Listener] = []
"""Who is told of the calls that originals compute: `listening` adds to it."""


@dataclass
class Tally:
    """The calls of one replacement, by module.

    A module is identified by its id. A reference would keep it alive, and its hash may run its code.

    Attributes:
        counts: The calls, by the number of their module; those of a function outside any module by that of ``None``.
        traced: Whether a call was traced. What a compiled program calls is not counted.
    """

    counts: dict[int, Count] = field(default_factory=dict)
    traced: bool = False

    def fused(self, module: Any) -> None:
        """Count a call that the kernel computed, unless its function left it to its reference."""
        if this_thread.declined:
            this_thread.declined = False
            count = self.original(module)
            if count.watcher is not None:
                count.reasons.setdefault(DECLINED)
            if listeners:
                tell(count, lambda: DECLINED)
            return
        try:
            count = self.counts[id(module)]
        except KeyError:
            count = self.of(module)
        count.fused += 1
        if 0 < count.until <= count.fused:
            count.reached()

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
        count = self.counts.get(id(module))
        return self.begin(module) if count is None else count

    def begin(self, module: Any) -> Count:
        """Count the calls on *module* from now on."""
        counts, number = self.counts, id(module)

        def forget(gone: weakref.ref[Any]) -> None:
            if number in counts and counts[number].alive is gone:
                del counts[number]

        count = counts[number] = Count(alive=None if module is None else weakref.ref(module, forget))
        return count


class Running(threading.local):
    """Whose method runs, for the functions that it looks up: they are called without it.

    Attributes:
        module: The module; ``None`` outside of all whose functions are replaced.
    """

    module: Any = None


running = Running()


def tell(count: Count, why: Callable[[], str]) -> None:
    """Tell `listeners` of a call that an original computes."""
    for heard in tuple(listeners):
        heard(count, why)


@contextlib.contextmanager
def listening(heard: Listener) -> Iterator[None]:
    """Call *heard* for each call that an original computes inside the block."""
    listeners.append(heard)
    try:
        yield
    finally:
        listeners.remove(heard)
