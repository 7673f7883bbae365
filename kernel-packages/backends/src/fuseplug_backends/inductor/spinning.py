"""Keep idle OpenMP threads from taking cores away from compilers.

GNU's OpenMP lets its threads spin for milliseconds after each parallel operation, unless it has more threads than there
are cores. While kernels are checked, parallel operations follow each other closely. On two cores, spinning slowed the
compilers so much that `apply_all` on Qwen3-0.6B took 16.5 s the first time instead of 13.3 s. Where nothing is
compiled, spinning is right: a sleeping thread takes long to wake, and without spinning the same call takes 7.5 s
instead of 6.8 s.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

LONG = 1.0
"""Seconds that a build takes only if a compiler runs: a program from Inductor's cache takes a tenth of a second."""


class Spinning:
    """The spinning of OpenMP's threads. It ends once a build takes `LONG`, until it is allowed again."""

    def __init__(self) -> None:
        self._first = threading.Lock()
        self._allowed = threading.Event()

    @contextlib.contextmanager
    def ended_by_what_takes_long(self) -> Iterator[None]:
        """End spinning if the code inside takes `LONG`."""
        timer = threading.Timer(LONG, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def allow(self) -> None:
        """Allow spinning again, from now on."""
        self._allowed.set()

    def _end(self) -> None:
        if self._first.acquire(blocking=False):
            # This makes OpenMP start one more thread: torch computes this number of elements, and no fewer, in two.
            torch.empty(1 << 16, device="cpu").fill_(0)
            self._allowed.wait()
