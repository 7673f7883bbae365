"""The results of the kit: faults by check, what could not be checked and why, and how much was checked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from fuseplug.errors import FuseplugError


class Finding(NamedTuple):
    """The outcome of one question of a check: right, unless there is a fault or the question was skipped.

    Attributes:
        where: The variant, dtypes, edge, … that the question is about.
        fault: What was found instead of what was expected.
        skipped: Why the question could not be put.
    """

    where: str
    fault: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a kernel.

    Attributes:
        check: The name of the check that found it.
        where: The specimen, and in it the variant, dtypes, edge, …
        what: What was found, and what was expected.
    """

    check: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}" if self.where else f"{self.check}: {self.what}"


class Skip(NamedTuple):
    """Something that could not be checked.

    Attributes:
        check: The name of the check.
        where: As in `Fault`.
        why: What stood in the way.
    """

    check: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.why}" if self.where else f"{self.check}: {self.why}"


@dataclass
class Conformance:
    """The outcome for one kernel; ``str`` of it is readable.

    Attributes:
        kernel_id: The id of the kernel.
        device: Where its numbers were checked; ``None`` if they were not.
        passed: How many questions were answered right, by check.
        skipped: What could not be checked.
        faults: The faults.
    """

    kernel_id: str
    device: str | None = None
    passed: Counter[str] = field(default_factory=Counter)
    skipped: list[Skip] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def add(self, check: str, subject: str, findings: list[Finding]) -> None:
        """Count *findings* of *check* about *subject*."""
        for where, fault, skipped in findings:
            place = ": ".join(part for part in (subject, where) if part)
            if fault:
                self.faults.append(Fault(check, place, fault))
            elif skipped:
                self.skipped.append(Skip(check, place, skipped))
            else:
                self.passed[check] += 1

    def __str__(self) -> str:
        name = f"{self.kernel_id} on {self.device}" if self.device else self.kernel_id
        right, skipped = sum(self.passed.values()), len(self.skipped)
        lines = [f"{name}: {len(self.faults)} faults; {right} questions answered right, {skipped} skipped"]
        lines += [f"  fault    {fault}" for fault in self.faults]
        lines += [f"  right    {check} ({count})" for check, count in self.passed.items()]
        grouped = Counter((skip.check, skip.why) for skip in self.skipped)
        lines += [f"  skipped  {check} ({count}): {why}" for (check, why), count in grouped.items()]
        return "\n".join(lines)


class ConformanceError(FuseplugError, AssertionError):
    """A kernel has faults: ``.result`` is the `Conformance`, and the message names every one."""

    result: Conformance
