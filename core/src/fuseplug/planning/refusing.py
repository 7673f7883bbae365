"""Turns what a report says into an error, for callers who asked for more than a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..contract import Rejection
from ..discovery.records import KernelRecord
from ..errors import RejectedError, VerificationError
from ..report import Entry, Report

MOST_NAMED = 5


def refuse_left_alone(report: Report) -> None:
    """For ``strict``: raise if a kernel raised, or if a target was left alone for a reason that counts.

    Four reasons do not count: the target computes something else, the user has not consented, or the kernel is slower
    or rounds otherwise.

    Raises:
        RejectedError: If so; `VerificationError` if a kernel's numbers were the reason.
    """
    hindered = [
        entry
        for entry in report.left_alone
        if any(rejection.kind not in ("unlike", "consent", "slower", "rounding") for _, rejection in entry.rejections)
    ]
    if report.raised:
        named = "; ".join(f"{kernel_id} raised an error, {what}" for kernel_id, what in report.raised.items())
        raise RejectedError(f"strict=True, and {named}. Leave it out with exclude=, or drop strict.", report=report)
    if hindered:
        named = "; ".join(f"{_site(entry)}: {entry.why_not}" for entry in hindered[:MOST_NAMED])
        more = f" (and {len(hindered) - MOST_NAMED} more)" if len(hindered) > MOST_NAMED else ""
        raise _error(rejection for entry in hindered for _, rejection in entry.rejections)(
            f"strict=True, and {len(hindered)} targets had to be left alone: {named}{more}. "
            "Leave them out with skip=, or drop strict.",
            report=report,
        )


def refuse_unused(report: Report, records_of: Mapping[str, Sequence[KernelRecord]]) -> None:
    """Raise if a kernel or op that was asked for by name is of no use in the model.

    Raises:
        RejectedError: If so; `VerificationError` if the kernel's numbers were the reason.
    """
    used = {entry.kernel_id for entry in report.fused} | {k for entry in report.fused for k in entry.outranked}
    for name, records in records_of.items():
        if any(record.kernel_id in used for record in records):
            continue
        why = "; ".join(f"{record.name}: {_why_unused(report, record)}" for record in records)
        raise _error(rejection for record in records for _, rejection in _said(report, record))(
            f"{name} was asked for by name, but fits nothing in {report.model_class}: {why}", report=report
        )


def _why_unused(report: Report, record: KernelRecord) -> str:
    sites: dict[str, list[Entry]] = {}
    for entry, rejection in _said(report, record):
        sites.setdefault(rejection.reason, []).append(entry)
    reasons = [f"{_sites(entries)}: {reason}" for reason, entries in sites.items()]
    general = report.raised.get(record.kernel_id) or report.idle.get(record.kernel_id)
    return general or "; ".join(reasons[:3]) or "this model has no module with this op"


def _said(report: Report, record: KernelRecord) -> list[tuple[Entry, Rejection]]:
    return [
        (entry, rejection)
        for entry in report.entries
        for named, rejection in entry.rejections
        # Fuseplug's own objection to a target is stated once, whichever kernel proposed it.
        if named == record.kernel_id or (named == "fuseplug" and record.kernel and entry.op == record.kernel.op)
    ]


def _site(entry: Entry) -> str:
    return f"{entry.paths[0] or 'the model'} ({entry.class_name})"


def _sites(entries: Sequence[Entry]) -> str:
    return _site(entries[0]) + (f" and {len(entries) - 1} more" if len(entries) > 1 else "")


def _error(rejections: Iterable[Rejection]) -> type[RejectedError]:
    return VerificationError if any(rejection.kind == "failed" for rejection in rejections) else RejectedError
