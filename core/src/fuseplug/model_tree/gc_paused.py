"""Keeping Python's cyclic garbage collector out of work that makes many objects and no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no cycles inside; usable as a decorator.

    Each of the hundred thousand objects made for a model of 31,000 modules is kept, and looking through all of them
    again and again took 0.4 s of 1.0.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
