"""A lock of this process: a child that is forked while another thread holds it finds it free."""

from __future__ import annotations

import os
import threading

__all__ = ["ProcessLock"]


class ProcessLock:
    """A re-entrant lock, to be used with ``with``.

    A fork has only the thread that forked. What another thread held would be held for ever in the child.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        if self._lock.acquire(blocking=False):  # nobody holds it, or this thread
            self._lock.release()
        else:
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
