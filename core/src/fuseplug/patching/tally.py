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
"""The number of calls of a target after which the watcher judges whether its kernel is in use."""

_ASKED = (1, 3, ENOUGH - 1)
"""The refused calls in a row whose reason is found. Finding a reason takes much longer than the call."""


class Watcher(Protocol):
    """Is told when a target has had `ENOUGH` calls."""

    def enough(self, pace: Count) -> None:
        """Take note that the target of *pace* has had `ENOUGH` calls."""


@dataclass(slots=True)
class Count:
    """The calls of one target of one module.

    Attributes:
        fused: How many calls the kernel computed.
        original: How many calls the original computed, or PyTorch, if the kernel's function declined.
        made_real: How many of the kernel's lazy results were computed after all, by what needed their values.
        reasons: While there is a watcher: why the original computed some of the latest calls. Calls that were too small
            have no reason.
        refused: While there is a watcher: how many calls in a row the kernel should have computed but was not given.
        before: How many calls the kernel had computed when the first of the refused calls came.
        until: The number of calls of the kernel at which the watcher is told; 0 for never.
        watcher: A weak reference to the watcher.
        alive: A weak reference to the module, which makes room for another module with the same id.
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
        """Count a lazy result whose values *why* needed."""
        self.made_real[why] = self.made_real.get(why, 0) + 1

    def watched_by(self, watcher: Watcher) -> None:
        """Tell *watcher* after the next `ENOUGH` calls of the kernel, and after as many refused in a row."""
        self.watcher, self.until = weakref.ref(watcher), self.fused + ENOUGH
        self.reasons, self.refused, self.before = {}, 0, self.fused

    def unwatched(self) -> None:
        """Remove the watcher."""
        self.watcher, self.until = None, 0

    def reached(self) -> None:
        """Note that the kernel has computed as many calls as the watcher waits for."""
        self.until *= 2
        self._tell()

    def refuse(self, why: Callable[[], str]) -> None:
        """Note a call that the kernel should have computed but was not given; *why* finds the reason."""
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
"""``heard(count, why)``: called for every call that goes to an original, with the count of its target. ``why()`` finds
the reason, which takes much longer than the call."""

listeners: list[Listener] = []
"""Callbacks for calls that the original computes; `listening` adds one."""


@dataclass
class Tally:
    """The calls of one replacement, by module.

    A module is identified by its id. A reference would keep the module alive, and its hash may run its code.

    Attributes:
        counts: The counts, by the id of the module. Calls of a function outside any module have the id of ``None``.
        traced: Whether a call was traced. Calls inside compiled programs are not counted.
    """

    counts: dict[int, Count] = field(default_factory=dict)
    traced: bool = False

    def fused(self, module: Any) -> None:
        """Count a call for the kernel, or for the original if the kernel's function left the call to its reference."""
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
        """The count of the calls on *module*."""
        count = self.counts.get(id(module))
        return self.begin(module) if count is None else count

    def begin(self, module: Any) -> Count:
        """Start a new count of the calls on *module*."""
        counts, number = self.counts, id(module)

        def forget(gone: weakref.ref[Any]) -> None:
            if number in counts and counts[number].alive is gone:
                del counts[number]

        count = counts[number] = Count(alive=None if module is None else weakref.ref(module, forget))
        return count


class Running(threading.local):
    """Holds the module whose method runs, because the functions that the method looks up are called without it.

    Attributes:
        module: The module; ``None`` outside all modules whose functions are replaced.
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
