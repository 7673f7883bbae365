"""Settings of the process, changed for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch


def _set(device: str) -> None:
    """Set the default device; ``"cpu"`` unsets it: unless torch is given None, it leaves a mode behind."""
    torch.set_default_device(None if device == "cpu" else device)
    if device == "cpu":
        with suppress(AttributeError):  # otherwise torch.get_default_device raises in torch 2.7
            del torch._GLOBAL_DEVICE_CONTEXT.device_context


@contextmanager
def default(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    """Call *setter* with *value* and, at the end, with *before*."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


def default_device(device: str) -> AbstractContextManager[None]:
    return default(_set, device, "cpu")
