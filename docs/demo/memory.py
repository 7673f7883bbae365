"""How much memory something needs at its peak, where the system says it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(run: Callable[[], object]) -> float | None:
    """Return the gigabytes that *run* had resident at its peak, above those before it; ``None`` outside of Linux."""
    try:
        RESET.write_text("5")
        before = _status("VmRSS")
    except OSError:
        run()
        return None
    run()
    return _status("VmHWM") - before


def _status(field: str) -> float:
    kilobytes = next(line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(kilobytes) / 1e6
