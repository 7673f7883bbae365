"""A rehearsal: kernels are called only to learn which programs they need, and these are built side by side.

A C++ compiler needs a second or more for a program, and verification waits for each program before it comes to the
next. In a rehearsal, nothing waits: building a program begins, and its function runs uncompiled instead.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import TypeVar

from ..torch_private.inductor import compile_header, inductor_threads
from .spinning import Spinning

T = TypeVar("T")


class Builders(ThreadPoolExecutor):
    """Threads that wait for C++ compilers."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="fuseplug-build")
        self._spinning = Spinning()
        self._header: Future[None] | None = None

    def prepare(self) -> None:
        """Begin to compile the header that all programs share, once."""
        if self._header is None:
            self._header = self.begin(compile_header)

    def begin(self, build: Callable[[], T]) -> Future[T]:
        """Call *build* in one of the threads, with the context variables of the caller's thread."""
        return self.submit(contextvars.copy_context().run, self._built, build, self._header)

    def give_up(self) -> None:
        """Begin no more builds."""
        self.shutdown(wait=False, cancel_futures=True)
        self._spinning.allow()

    def _built(self, build: Callable[[], T], after: Future[None] | None) -> T:
        if after is not None:
            # Inductor would wait for the header, too, but first preprocess it again to see whether it is the same.
            wait([after])
        with self._spinning.ended_by_what_takes_long():
            return build()


_builders: ContextVar[Builders | None] = ContextVar("fuseplug_builders", default=None)


@contextlib.contextmanager
def building(threads: int) -> Iterator[Builders]:
    """Builders of programs, with this number of *threads*. On exit, builds that have not begun are given up."""
    builders = Builders(threads)
    try:
        yield builders
    finally:
        builders.give_up()


@contextlib.contextmanager
def rehearsal(builders: Builders) -> Iterator[None]:
    """Inside, in this thread, a call of a program that is not built yet has *builders* begin to build it."""
    before = _builders.set(builders)
    try:
        yield
    finally:
        _builders.reset(before)


@contextlib.contextmanager
def side_by_side() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]] | None]:
    """A `fuseplug.BaseKernel.rehearsal` with as many compilers as Inductor would run at once."""
    threads = inductor_threads()
    if threads == 1:
        yield None
        return
    with building(threads) as builders:
        yield functools.partial(rehearsal, builders)


def rehearsing() -> Builders | None:
    """The builders of programs if this is a rehearsal; otherwise ``None``."""
    return _builders.get()
