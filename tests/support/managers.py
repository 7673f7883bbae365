"""Managers that see nothing of what happens to be installed."""

from __future__ import annotations

from fuseplug import BaseKernel, KernelManager


def manager_of(*kernels: type[BaseKernel]) -> KernelManager:
    """A manager of its own with *kernels* alone, and without what ``FUSEPLUG_KERNELS`` says."""
    manager = KernelManager(environ={}, find=lambda _, registered: sorted(registered, key=lambda record: record.name))
    for kernel in kernels:
        manager.register(kernel)
    return manager
