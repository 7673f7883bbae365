"""Settings of the process, set for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """As ``torch.set_default_device``, which leaves no mode behind only if it is set back to ``None``."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        with suppress(AttributeError):
            # torch 2.7 keeps the None, and get_default_device() raises from then on.
            del torch._GLOBAL_DEVICE_CONTEXT.device_context
