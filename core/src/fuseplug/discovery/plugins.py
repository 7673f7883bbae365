"""Makes kernels plugins of pluggy, which asks all of them one question."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import replace

import pluggy

from ..hookspecs import PROJECT, BaseKernel
from .records import KernelRecord


def plugged_in(records: Iterable[KernelRecord]) -> tuple[list[KernelRecord], pluggy.PluginManager]:
    """The records, marked as broken where pluggy rejects the kernel, and a plugin manager with all other kernels."""
    plugins = pluggy.PluginManager(PROJECT)
    plugins.add_hookspecs(BaseKernel)
    return [_registered_with(plugins, record) for record in records], plugins


def _registered_with(plugins: pluggy.PluginManager, record: KernelRecord) -> KernelRecord:
    """Register the kernel of *record*. If pluggy rejects it, only this record becomes broken."""
    if record.kernel is None:
        return record
    try:
        plugins.register(record.kernel, name=record.kernel_id)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - pluggy looks at every attribute of a third party's class
        reason = f"{type(error).__name__} while registering it with pluggy: {error}"
        return replace(record, state="broken", kernel=None, reason=reason, traceback=traceback.format_exc())
    return record
