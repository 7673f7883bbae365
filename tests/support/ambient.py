"""Settings of the process, set for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fuseplug.torch_private import set_default_device


@contextmanager
def default_device(device: str) -> Iterator[None]:
    set_default_device(device)
    try:
        yield
    finally:
        set_default_device("cpu")
