"""Says what every kernel answered about one module, including kernels that have nothing to do with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from ..discovery.records import KernelRecord
from ..errors import PlanError
from ..report import Entry, Report
from ..report.plain_text import printable


def explain(report: Report, classes: Mapping[str, str], path: str) -> str:
    """Say for the module at *path* what each kernel answered.

    Args:
        report: The report of the plan.
        classes: The class of every module that was planned, by path.
        path: The path of the module; ``""`` for the model itself.

    Raises:
        PlanError: If there is no module at *path*, or the module was left out.
    """
    if path not in classes:
        near = difflib.get_close_matches(path, classes, n=3, cutoff=0.4)
        hint = f"; near it: {', '.join(map(repr, near))}" if near else ""
        raise PlanError(f"no module at {path!r} was planned: it is not there, or left out by only= or skip={hint}")
    entries = [entry for entry in report.entries if path in entry.paths] or [Entry((path,), classes[path], "")]
    lines = [f"{path or 'the model'} ({classes[path]}), for {report.mode}"]
    width = max((len(record.kernel_id) for record in report.records), default=0)
    for entry in entries:
        lines.append(f"  {entry.target or 'no kernel would replace anything in it'}")
        if entry.covered_by:
            lines.append(f"    it is no longer called: {entry.covered_by} is fused")
        lines += [f"    fuseplug: {why.reason}" for kernel, why in entry.rejections if kernel == "fuseplug"]
        for record in report.records:
            first, *more = _answers(report, record, entry)
            lines.append(f"    {record.kernel_id:{width}}  {first}")
            lines += [f"    {'':{width}}  {line}" for line in more]
    return printable("\n".join(lines))


def _answers(report: Report, record: KernelRecord, entry: Entry) -> Iterator[str]:
    """The answers of *record*'s kernel about *entry*, one line each."""
    kernel_id = record.kernel_id
    rejections = [rejection.reason for kernel, rejection in entry.rejections if kernel == kernel_id]
    if kernel_id == entry.kernel_id:
        yield f"fuses it: {entry.variant}; kernel check {entry.check}"
        yield from _sizes(entry.gains_from, entry.gains_until)
        yield from (f"measured with {figure}" for figure in entry.figures)
        yield from (f"watched at each call: {term}" for term in entry.watched)
    elif kernel_id in entry.outranked:
        yield f"would fuse it too; {entry.kernel_id} is preferred"
    elif rejections:
        yield from rejections
    elif record.state != "ready":
        yield f"{record.state}: {record.reason}"
    else:
        yield report.raised.get(kernel_id) or report.idle.get(kernel_id, "this module does not have the kernel's op")


def _sizes(gains_from: Mapping[str, int | None], gains_until: Mapping[str, int]) -> Iterator[str]:
    """The sizes at which the kernel is used, one line for each number of elements."""
    for most in sorted(set(gains_until.values())):
        kinds = ", ".join(kind for kind, until in gains_until.items() if until == most)
        yield f"used up to {most:,} elements of the main input: {kinds}"
    for number in sorted(set(gains_from.values()), key=lambda number: (number is None, number)):
        kinds = ", ".join(kind for kind, least in gains_from.items() if least == number)
        when = "never used otherwise" if gains_until else "never used"
        when = when if number is None else f"used from {number:,} elements of the main input on"
        yield f"{when}: {kinds}"
