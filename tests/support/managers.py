"""Managers that ignore whatever happens to be installed."""

from __future__ import annotations

from fuseplug import BaseKernel, KernelManager


def manager_of(*kernels: type[BaseKernel]) -> KernelManager:
    """A new manager with *kernels* alone, which also ignores ``FUSEPLUG_KERNELS``."""
    manager = KernelManager(environ={}, find=lambda _, registered: sorted(registered, key=lambda record: record.name))
    for kernel in kernels:
        manager.register(kernel)
    return manager
