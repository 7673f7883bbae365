"""Managers that see nothing of what happens to be installed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from unittest import mock

from fuseplug import BaseKernel, KernelManager, KernelRecord
from fuseplug.discovery import discover


def manager_of(*kernels: type[BaseKernel]) -> KernelManager:
    """A manager of its own with *kernels* alone, and without what ``FUSEPLUG_KERNELS`` says."""
    manager = KernelManager(environ={}, find=_registered)
    for kernel in kernels:
        manager.register(kernel)
    return manager


def _registered(environ: Mapping[str, str] = os.environ, registered: Iterable[KernelRecord] = ()) -> list[KernelRecord]:
    # Only while it looks: the manager of the process, which may look for the first time meanwhile, sees what there is.
    with mock.patch("fuseplug.discovery._installed", return_value=()):
        return discover(environ, registered)
