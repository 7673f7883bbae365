"""A lock of this process that is free in a forked child, even if another thread held it at the fork."""

from __future__ import annotations

import os
import threading

__all__ = ["ProcessLock"]


class ProcessLock:
    """A re-entrant lock, used as a context manager.

    A forked child has only the thread that forked. A plain lock that another thread held would stay locked there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        if self._lock.acquire(blocking=False):  # no thread holds it, or this thread does
            self._lock.release()
        else:
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
