"""Threads of OpenMP that wait for work leave the cores to compilers.

GNU's OpenMP lets them spin for milliseconds after each parallel operation, unless it has more threads than there are
cores. While kernels are checked, such operations follow each other closely. On two cores this held compilers up so much
that `apply_all` on Qwen3-0.6B took 16.5 s the first time instead of 13.3. Where nothing is compiled, spinning is right:
a thread that sleeps takes long to wake, and the same call takes 7.5 s instead of 6.8.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

LONG = 1.0
"""Seconds that a build takes only if a compiler runs: from Inductor's cache a program comes in a tenth of one."""


class Spinning:
    """Ends where something takes `LONG`, until it is allowed again."""

    def __init__(self) -> None:
        self._first = threading.Lock()
        self._allowed = threading.Event()

    @contextlib.contextmanager
    def ended_by_what_takes_long(self) -> Iterator[None]:
        """End it if what is done inside takes `LONG`."""
        timer = threading.Timer(LONG, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def allow(self) -> None:
        """As before, and from now on."""
        self._allowed.set()

    def _end(self) -> None:
        if self._first.acquire(blocking=False):
            # This thread starts one more of OpenMP: so many elements are the fewest that torch computes in two threads.
            torch.empty(1 << 16, device="cpu").fill_(0)
            self._allowed.wait()
