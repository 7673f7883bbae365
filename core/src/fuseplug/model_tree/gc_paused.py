"""Keeps Python's cyclic garbage collector out of work that makes many objects and no garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no cycles within the block; usable as a decorator.

    For a model of 31,000 modules, a hundred thousand objects are made, and all are kept. To look through them again and
    again took 0.4 s of 1.0.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
