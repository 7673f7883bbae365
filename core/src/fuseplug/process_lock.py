"""A lock that is free in a forked child, for authors of code that several kernels share."""

from __future__ import annotations

from fuseplug_verify import ProcessLock

__all__ = ["ProcessLock"]
