"""Measures the peak memory of a call, where the device or the system reports it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(run: Callable[[], Any], device_type: str = "cpu") -> float | None:
    """Run *run* and measure its peak memory, above what was in use before.

    Args:
        run: The function to call; it returns when its work is done.
        device_type: Where its tensors are. On a CPU, resident memory counts, as Linux reports it.

    Returns:
        Bytes; ``None`` if neither the device nor the system reports them.
    """
    if device_type != "cpu":
        return _on_device(run, getattr(torch, device_type, None))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc keeps freed memory for later, up to 32 MB a piece
        trim(0)
    try:
        _RESET.write_text("5")
        before = _resident("VmRSS")
    except OSError:
        run()
        return None
    run()
    return _resident("VmHWM") - before


def _on_device(run: Callable[[], Any], backend: Any) -> float | None:
    if not all(hasattr(backend, name) for name in ("reset_peak_memory_stats", "max_memory_allocated")):
        run()
        return None
    backend.reset_peak_memory_stats()
    before = backend.memory_allocated()
    run()
    return float(backend.max_memory_allocated() - before)


def _resident(field: str) -> float:
    lines = _STATUS.read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(field))
