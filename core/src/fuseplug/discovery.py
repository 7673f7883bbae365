"""What is installed: entry points read as metadata, each loaded on its own, and what came of it kept as a record."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement

from .configuration import SETTINGS, environment, named
from .hookspecs import ENTRY_POINT_GROUP, BaseKernel
from .import_cost import import_costs
from .kernel_faults import faults
from .ownership import normal, owner

KERNELS_VARIABLE = SETTINGS["kernels"].variable
ALLOW_VARIABLE = SETTINGS["allow"].variable

State = Literal["ready", "off", "not allowed", "not installed", "missing", "broken", "conflict"]


@dataclass(frozen=True)
class KernelRecord:
    """One kernel that is installed, registered, or asked for by the environment, and what came of it.

    Attributes:
        kernel_id: Its id: the name of its entry point.
        distribution: Who it comes from; ``"(registered)"`` for a kernel registered in this process.
        version: The distribution's version, if it has one.
        value: What the entry point names.
        state: ``"ready"``; ``"off"`` (by ``FUSEPLUG_KERNELS``); ``"not allowed"`` (by ``FUSEPLUG_ALLOW``);
            ``"not installed"`` (the extra that it needs); ``"missing"`` (a requirement of the distribution itself);
            ``"broken"`` (it could not be loaded); ``"conflict"`` (another distribution claims its id, and has it, or
            nobody can tell whose it is).
        reason: Why it is not ready, and what to do; ``""`` if it is.
        requires: Of one that is ready on another machine only: what has to be installed there.
        kernel: The kernel, if it was loaded.
        traceback: What Python said when it could not be.
        import_costs: What its import costs everybody, ``fuseplug list`` too: a heavy library, or time.
    """

    kernel_id: str
    distribution: str
    version: str = ""
    value: str = ""
    state: State = "ready"
    reason: str = ""
    requires: str = ""
    kernel: BaseKernel | None = None
    traceback: str = ""
    import_costs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that is unique even where two distributions claim one id."""
        return f"{self.distribution}:{self.kernel_id}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data: what ``fuseplug list --json`` prints."""
        kernel = self.kernel
        return {
            "id": self.kernel_id,
            "distribution": self.distribution,
            "version": self.version,
            "entry_point": self.value,
            "state": self.state,
            "reason": self.reason,
            "api": kernel.api if kernel else None,
            "op": kernel.op if kernel else None,
            "device_types": list(kernel.device_types) if kernel else None,
            "differentiable": kernel.differentiable if kernel else None,
            "priority": kernel.priority if kernel else None,
            "traceback": self.traceback,
            "import_costs": list(self.import_costs),
        }


_Claim = tuple[KernelRecord, "importlib_metadata.EntryPoint | None"]
"""A record, and what is to be loaded to complete it."""


def discover(
    environ: Mapping[str, str] | None = None,
    registered: Iterable[KernelRecord] = (),
) -> list[KernelRecord]:
    """Find every kernel of the entry-point group, in an order that does not depend on ``sys.path``.

    Args:
        environ: Where ``FUSEPLUG_KERNELS`` and ``FUSEPLUG_ALLOW`` are read; ``None``: the environment and the user's
            file.
        registered: Kernels that were registered in this process, which are chosen among and may clash as others do.

    Raises:
        SettingsError: If the user's file is not right.
    """
    environ = environment() if environ is None else environ
    selection, allowed = _Selection(environ), _allowed(environ.get(ALLOW_VARIABLE))
    found = [*_installed(), *((record, None) for record in registered)]
    claims = []
    for record, entry in sorted(found, key=lambda claim: claim[0].name):
        if entry and allowed is not None and normal(record.distribution) not in allowed:
            reason = f"{named(environ, ALLOW_VARIABLE)} does not name {record.distribution}"
            record = replace(record, state="not allowed", reason=reason)
        elif why := selection.refuses(record):
            record = replace(record, state="off", reason=why, kernel=None)
        claims.append((record, entry))
    settled = list(_quarantine(claims))
    loaded = [_load(record, entry) if entry and record.state == "ready" else record for record, entry in settled]
    return loaded + [
        KernelRecord(name, "", state="missing", reason=f"{selection.said_by} names it, but it is not installed")
        for name in selection.unmatched(record for record, _ in settled)
    ]


def load_class(kernel: Any, record: KernelRecord) -> KernelRecord:
    """Check and instantiate *kernel*, and complete *record* with what came of it."""
    wrong = faults(kernel)
    if not wrong and kernel.kernel_id != record.kernel_id:
        wrong = [
            f"its kernel_id is {kernel.kernel_id!r}, its entry point is named {record.kernel_id!r}: make them equal"
        ]
    if wrong:
        return replace(record, state="broken", reason="; ".join(wrong))
    return replace(record, kernel=kernel())


def elsewhere(record: KernelRecord) -> KernelRecord:
    """What *record* would be on a machine where its extra is installed, if that is all it lacks.

    An extra is a matter of where a kernel runs, and it may be planned for another machine than this one.
    """
    kernel = kernel_of(record) if record.state == "not installed" else None
    if kernel is None:
        return record
    return replace(record, state="ready", reason="", requires=_with_extras(record, _entry(record)), kernel=kernel)


def chosen(records: Sequence[KernelRecord], words: Iterable[str]) -> list[KernelRecord]:
    """*records*, in which each that is in conflict and that one of *words* names as ``distribution:id`` is in force.

    Then no other of its id is. Its distribution is imported now.
    """
    found = list(records)
    for word in words:
        for record in [each for each in found if each.name == word and each.state == "conflict"]:
            if sum(each.name == word for each in found) == 1:
                won = _load(replace(record, state="ready", reason=""), _entry_of(record))
                found = [_given_way(each, won) if each.kernel_id == won.kernel_id else each for each in found]
    return found


def _given_way(record: KernelRecord, won: KernelRecord) -> KernelRecord:
    if record.name == won.name:
        return won
    if record.kernel is None:
        return record
    return replace(record, state="conflict", reason=f"{won.name} was asked for instead", kernel=None)


def kernel_of(record: KernelRecord) -> BaseKernel | None:
    """The kernel of *record*: loaded now if it is off or only its extra is missing; ``None`` if there is none."""
    if record.state not in ("off", "not installed"):
        return record.kernel
    try:
        with import_costs(_entry(record).module, record.name):
            return load_class(_entry(record).load(), record).kernel
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - what is missing may be what its import needs
        return None


def missing_requirements(distribution: importlib_metadata.Distribution | Any, extras: Iterable[str]) -> list[str]:
    """The requirements of *distribution*, those of *extras* included, that are not met; each with what was found."""
    wanted = ("", *extras)
    lacking = []
    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            lacking.append(f"{line} (not a valid requirement: {error})")
            continue
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
            continue
        try:
            version = _version(requirement.name)
        except importlib_metadata.PackageNotFoundError:
            lacking.append(f"{requirement.name}{requirement.specifier} (not installed)")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lacking.append(f"{requirement.name}{requirement.specifier} (installed: {version})")
    return lacking


_ALSO = {"triton": ("triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu", "pytorch-triton")}
"""Names under which torch's wheels for other devices bring what has this name on the package index."""


def _version(name: str) -> str:
    for other in _ALSO.get(normal(name), ()):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            return importlib_metadata.version(other)
    return importlib_metadata.version(name)


def _installed() -> Iterator[_Claim]:
    """What the installed distributions claim to have; one whose metadata is damaged costs nobody else anything."""
    names = set()
    for distribution in importlib_metadata.distributions():
        try:
            if ENTRY_POINT_GROUP in (distribution.read_text("entry_points.txt") or ""):
                names.add(normal(distribution.name))
        except Exception as error:  # noqa: BLE001 - files may hold anything
            yield _damaged(Path(str(getattr(distribution, "_path", "(unknown)"))).name, error), None
    for name in names:
        try:
            # By name, which finds what Python imports: another of the name, further down sys.path, has no say.
            yield from list(_claims(importlib_metadata.distribution(name)))
        except Exception as error:  # noqa: BLE001
            yield _damaged(name, error), None


def _claims(distribution: importlib_metadata.Distribution | Any) -> Iterator[_Claim]:
    name, version = distribution.name, distribution.version  # each reads and parses the metadata anew
    for entry in distribution.entry_points.select(group=ENTRY_POINT_GROUP):
        yield KernelRecord(entry.name, name, version, entry.value), entry


def _damaged(distribution: str, error: Exception) -> KernelRecord:
    reason = f"its metadata cannot be read: {type(error).__name__}: {error}: uninstall it, or install it again"
    return KernelRecord("(unknown)", distribution, state="broken", reason=reason, traceback=traceback.format_exc())


def _quarantine(claims: Sequence[_Claim]) -> Iterator[_Claim]:
    claimants = defaultdict(list)
    for record, _ in claims:
        if record.state == "ready":
            claimants[record.kernel_id].append(record.distribution)
    owners = {kernel_id: _owner(kernel_id, names) for kernel_id, names in claimants.items() if len(names) > 1}
    for record, entry in claims:
        if record.state == "ready" and owners.get(record.kernel_id, record.distribution) != record.distribution:
            reason = _clash(record, claimants[record.kernel_id], owners[record.kernel_id])
            record = replace(record, state="conflict", reason=reason, kernel=None)
        yield record, entry


def _owner(kernel_id: str, distributions: Sequence[str]) -> str | None:
    found = owner(kernel_id, distributions)
    return None if distributions.count(found or "") > 1 else found


def _clash(record: KernelRecord, distributions: Sequence[str], its_owner: str | None) -> str:
    if distributions.count(record.distribution) > 1:
        times = distributions.count(record.distribution)
        return f"{record.name} is declared {times} times by its own distribution, which has to be mended"
    names = sorted({f"{name}:{record.kernel_id}" for name in distributions})
    others = ",".join(f"-{name}" for name in names if name != record.name)
    choose = f"choose this one with {KERNELS_VARIABLE}={others}, or ask for it as {record.name}"
    if its_owner is None:
        return f"claimed by {' and '.join(names)}; uninstall all but one, or {choose}"
    return f"the id is that of {its_owner}, which stays in force; uninstall {record.distribution}, or {choose}"


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
        # Whether somebody pressed Ctrl-C or the plug-in raised it cannot be told.
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


def _entry_of(record: KernelRecord) -> importlib_metadata.EntryPoint:
    """The entry point of *record* with its distribution, whose requirements are to be checked."""
    entries = importlib_metadata.distribution(record.distribution).entry_points
    found: importlib_metadata.EntryPoint
    (found,) = entries.select(group=ENTRY_POINT_GROUP, name=record.kernel_id)
    return found


def _entry(record: KernelRecord) -> importlib_metadata.EntryPoint:
    return importlib_metadata.EntryPoint(record.kernel_id, record.value, ENTRY_POINT_GROUP)


def _with_extras(record: KernelRecord, entry: importlib_metadata.EntryPoint) -> str:
    return f"{record.distribution}[{','.join(entry.extras)}]" if entry.extras else record.distribution


def _allowed(value: str | None) -> set[str] | None:
    return None if value is None else {normal(name) for name in _split(value)}


def _split(value: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", value) if word]


class _Selection:
    """``FUSEPLUG_KERNELS``: ids to use, ``-id`` to leave out, ``none`` for nothing; ids may say ``distribution:id``."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.said_by, value = named(environ, KERNELS_VARIABLE), environ.get(KERNELS_VARIABLE)
        words = _split(value or "")
        self.nothing = words == ["none"] or (value is not None and not words)
        self.wanted = [word for word in words if not word.startswith("-") and word != "none"]
        self.unwanted = [word[1:] for word in words if word.startswith("-")]

    def refuses(self, record: KernelRecord) -> str:
        if self.nothing:
            return f"{self.said_by} turns every kernel off"
        if self._names(record, self.unwanted):
            return f"{self.said_by} leaves it out"
        if self.wanted and not self._names(record, self.wanted):
            return f"{self.said_by} names others only"
        return ""

    def unmatched(self, records: Iterable[KernelRecord]) -> list[str]:
        seen = list(records)
        return [word for word in self.wanted + self.unwanted if not any(self._names(r, [word]) for r in seen)]

    @staticmethod
    def _names(record: KernelRecord, words: list[str]) -> bool:
        return record.kernel_id in words or record.name in words
