"""Finds what is installed: reads entry points as metadata, loads each on its own, and records the outcome."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import importlib_metadata

from ..configuration import environment, named
from ..hookspecs import ENTRY_POINT_GROUP, BaseKernel
from .import_cost import import_costs
from .kernel_faults import faults
from .ownership import in_conflict, normal
from .records import KernelRecord, State
from .requirements import missing_requirements, version_of
from .selecting import ALLOW_VARIABLE, KERNELS_VARIABLE, Selection, allowed

_Claim = tuple[KernelRecord, "importlib_metadata.EntryPoint | None"]
"""A record, and the entry point to load to complete it, if any."""


def discover(
    environ: Mapping[str, str] | None = None,
    registered: Iterable[KernelRecord] = (),
) -> list[KernelRecord]:
    """Find every kernel of the entry-point group, in an order that does not depend on ``sys.path``.

    Args:
        environ: The variables, of which ``FUSEPLUG_KERNELS`` and ``FUSEPLUG_ALLOW`` are read; ``None`` for the
            environment and the user's file.
        registered: Kernels that were registered in this process. Like others, they may be off or in conflict.

    Raises:
        SettingsError: If the user's file is not valid.
    """
    version_of.cache_clear()
    environ = environment() if environ is None else environ
    selection, distributions = Selection(environ), allowed(environ)
    installed = [*_installed(), *((record, None) for record in registered)]
    claims = []
    for record, entry in sorted(installed, key=lambda claim: claim[0].name):
        if entry and distributions is not None and normal(record.distribution) not in distributions:
            reason = f"{named(environ, ALLOW_VARIABLE)} does not name {record.distribution}"
            record = replace(record, state="not allowed", reason=reason)
        elif why := selection.refuses(record):
            record = replace(record, state="off", reason=why, kernel=None)
        claims.append((record, entry))
    settled = list(_without_conflicts(claims))
    loaded = [_load(record, entry) if entry and record.state == "ready" else record for record, entry in settled]
    return loaded + [
        KernelRecord(name, "", state="missing", reason=f"{selection.said_by} names it, but it is not installed")
        for name in selection.unmatched(record for record, _ in settled)
    ]


def load_class(kernel: Any, record: KernelRecord) -> KernelRecord:
    """Check and instantiate *kernel*, and return *record* completed with the outcome."""
    wrong = faults(kernel)
    if not wrong and kernel.kernel_id != record.kernel_id:
        wrong = [
            f"its kernel_id is {kernel.kernel_id!r}, its entry point is named {record.kernel_id!r}: make them equal"
        ]
    if wrong:
        return replace(record, state="broken", reason="; ".join(wrong))
    return replace(record, kernel=kernel())


def elsewhere(record: KernelRecord) -> KernelRecord:
    """*record* as it would be where its extra is installed, if it lacks nothing else.

    A kernel needs its extra only on the machine where it runs, and a plan may be for another machine than this one.
    """
    kernel = kernel_of(record) if record.state == "not installed" else None
    if kernel is None:
        return record
    return replace(record, state="ready", reason="", requires=_with_extras(record, _entry(record)), kernel=kernel)


def kernel_of(record: KernelRecord) -> BaseKernel | None:
    """The kernel of *record*: loaded now if it is off or only its extra is missing; ``None`` if there is none."""
    if record.state not in ("off", "not installed"):
        return record.kernel
    try:
        with import_costs(_entry(record).module, record.name):
            return load_class(_entry(record).load(), record).kernel
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - its import may need what is missing
        return None


def _installed() -> Iterator[_Claim]:
    """The claims of the installed distributions. One with damaged metadata does not affect the others."""
    names = set()
    for distribution in importlib_metadata.distributions():
        try:
            if ENTRY_POINT_GROUP in (distribution.read_text("entry_points.txt") or ""):
                names.add(normal(distribution.name))
        except Exception as error:  # noqa: BLE001 - files may hold anything
            yield _damaged(Path(str(getattr(distribution, "_path", "(unknown)"))).name, error), None
    for name in names:
        try:
            # A name finds the distribution that Python imports, not another of this name further down sys.path.
            yield from list(_claims(importlib_metadata.distribution(name)))
        except Exception as error:  # noqa: BLE001
            yield _damaged(name, error), None


def _claims(distribution: importlib_metadata.Distribution | Any) -> Iterator[_Claim]:
    name, version = distribution.name, distribution.version  # each access parses the metadata anew
    for entry in distribution.entry_points.select(group=ENTRY_POINT_GROUP):
        yield KernelRecord(entry.name, name, version, value=entry.value), entry


def _damaged(distribution: str, error: Exception) -> KernelRecord:
    reason = f"its metadata cannot be read: {type(error).__name__}: {error}: uninstall it, or install it again"
    return KernelRecord("(unknown)", distribution, state="broken", reason=reason, traceback=traceback.format_exc())


def _without_conflicts(claims: Sequence[_Claim]) -> Iterator[_Claim]:
    claimants = defaultdict(list)
    for record, _ in claims:
        if record.state == "ready":
            claimants[record.kernel_id].append(record.distribution)
    for record, entry in claims:
        if record.state == "ready" and (why := in_conflict(record, claimants[record.kernel_id])):
            record = replace(record, state="conflict", reason=why, kernel=None)
        yield record, entry


def _load(record: KernelRecord, entry: importlib_metadata.EntryPoint) -> KernelRecord:
    try:
        if entry.dist and (lacking := missing_requirements(entry.dist, entry.extras)):
            state: State = "missing" if missing_requirements(entry.dist, ()) else "not installed"
            remedy = f'pip install "{_with_extras(record, entry)}"'
            return replace(record, state=state, reason=f"needs {', '.join(lacking)}: {remedy}")
        with import_costs(entry.module, record.name) as costs:
            loaded = _imported(record, entry)
        return replace(loaded, import_costs=tuple(costs))
    except Exception as error:  # noqa: BLE001 - metadata may hold anything
        return _broken(record, error)


def _imported(record: KernelRecord, entry: importlib_metadata.EntryPoint) -> KernelRecord:
    try:
        return load_class(entry.load(), record)
    except KeyboardInterrupt as error:
        # Ctrl-C cannot be told from a plug-in that raises KeyboardInterrupt.
        raise KeyboardInterrupt(
            f"interrupted while importing kernel {record.name} ({record.value}); if nobody pressed Ctrl-C, the "
            f"distribution raised it: uninstall {record.distribution}, or leave it out with {KERNELS_VARIABLE}=-"
            f"{record.kernel_id}"
        ) from error
    except BaseException as error:  # noqa: BLE001 - a third party's import may raise anything, or exit
        return _broken(record, error)


def _broken(record: KernelRecord, error: BaseException) -> KernelRecord:
    reason = f"{type(error).__name__}: {error} (its entry point names {record.value})"
    return replace(record, state="broken", reason=reason, traceback=traceback.format_exc())


def _entry(record: KernelRecord) -> importlib_metadata.EntryPoint:
    return importlib_metadata.EntryPoint(record.kernel_id, record.value, ENTRY_POINT_GROUP)


def _with_extras(record: KernelRecord, entry: importlib_metadata.EntryPoint) -> str:
    return f"{record.distribution}[{','.join(entry.extras)}]" if entry.extras else record.distribution
