"""A lock that a forked child finds free, for those who write what kernels of a backend share."""

from __future__ import annotations

from fuseplug_verify import ProcessLock

__all__ = ["ProcessLock"]
