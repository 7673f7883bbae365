"""A rehearsal: kernels are called for their programs alone, which are then built side by side.

A C++ compiler needs a second or more for a program, and verification waits for one before it comes to the next. In a
rehearsal nothing waits: programs begin to be built, and their functions are run instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import torch

from ..torch_private.inductor import begin_header


class Builders(ThreadPoolExecutor):
    """Threads that wait for C++ compilers."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="fuseplug-build", initializer=self._crowd)
        self._crowded = iter([False])
        self._prepared = False

    def _crowd(self) -> None:
        """Have OpenMP, as long as these threads live, leave the cores to compilers while its own threads wait.

        GNU's OpenMP lets them spin for milliseconds after each parallel operation, unless it has more threads than
        there are cores. So the first thread here makes it start one more. On two cores compilers were held up so much
        by this that `apply_all` on Qwen3-0.6B took 16.2 s the first time instead of 13.0.
        """
        if next(self._crowded, True):
            return
        # The fewest elements that torch computes in two threads.
        torch.empty(1 << 16, device="cpu").fill_(0)

    def prepare(self) -> None:
        """Begin with what all programs share, once."""
        if not self._prepared:
            self._prepared = True
            begin_header(self)


_builders: ContextVar[Builders | None] = ContextVar("fuseplug_builders", default=None)


@contextlib.contextmanager
def building(threads: int) -> Iterator[Builders]:
    """What builds programs, with so many *threads*. In the end, what nobody has waited for is given up."""
    builders = Builders(threads)
    try:
        yield builders
    finally:
        builders.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def rehearsal(builders: Builders) -> Iterator[None]:
    """Inside, in this thread, a program that is called and not there yet begins to be built by *builders*."""
    before = _builders.set(builders)
    try:
        yield
    finally:
        _builders.reset(before)


def rehearsing() -> Builders | None:
    """What builds programs, if this is a rehearsal."""
    return _builders.get()
