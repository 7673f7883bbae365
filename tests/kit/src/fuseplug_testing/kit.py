"""The walk: every check on everything it is asked about, faults of one hiding no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuseplug.verification import neutral

from .checks import CHECKS, Check
from .results import Conformance, ConformanceError, Finding
from .subjects import Examined, Specimen, raised
from .triton import rounding_to_nearest


@dataclass(frozen=True)
class Step:
    """One check on one subject.

    Attributes:
        check: The check.
        examined: The kernel.
        specimen: The specimen; ``None`` for a check of the kernel as such.
    """

    check: Check
    examined: Examined
    specimen: Specimen | None = None

    @property
    def subject(self) -> str:
        """What it is about, for people."""
        return "" if self.specimen is None else self.specimen.label

    def run(self) -> list[Finding]:
        """Carry it out; what it raises is a fault."""
        if why := self._hindered():
            return [Finding("", skipped=why)]
        findings: list[Finding] = []
        try:
            with rounding_to_nearest(), neutral(self.examined.device_type if self.examined.device else "cpu"):
                findings.extend(self._ask())
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            findings.append(Finding("", fault=f"raises {raised(error)}"))
        if self.specimen is not None:
            self.specimen.settled[self.check.name] = not any(finding.fault for finding in findings)
        return findings

    def _hindered(self) -> str:
        if self.examined.broken and self.check.name != "declaration":
            return "it is not declared as a kernel"
        if self.check.runs and self.examined.device is None:
            return self.examined.absent
        if self.specimen is not None:
            if self.check.runs and (why := self.specimen.all_declined):
                return why
            for needed in self.check.needs:
                if needed in self.specimen.settled and not self.specimen.settled[needed]:
                    return f"{needed} has faults on it"
        return ""

    def _ask(self) -> Iterator[Finding]:
        if self.specimen is None:
            yield from self.check.ask(self.examined)
        elif self.check.per == "specimen":
            yield from self.check.ask(self.specimen)
        else:
            for case in self.specimen.cases:
                for where, fault, skipped in self.check.ask(case):
                    yield Finding(f"{case.label}: {where}" if where else case.label, fault, skipped)


def steps(examined: Examined) -> list[Step]:
    """Every check on everything it is asked about: the kernel first, then specimen by specimen."""
    found = [Step(check, examined) for check in CHECKS if check.per == "kernel"]
    for specimen in examined.specimens:
        found += [Step(check, examined, specimen) for check in CHECKS if check.per != "kernel"]
    return found


def check_kernel(
    kernel: Any,
    specimens: Sequence[nn.Module] | None = None,
    *,
    device: torch.device | str | None = None,
    thorough: bool = False,
    checks: Sequence[str] | None = None,
) -> Conformance:
    """Check *kernel* in every way that the kit knows.

    Args:
        kernel: A subclass of `BaseKernel`, or an instance.
        specimens: Small modules that it fuses, at least one for each variant; those that it declares if ``None``.
        device: Where to run it. If ``None``, the first of its device types that is here; if none is, its numbers are
            skipped and the rest is checked.
        thorough: Try every edge on every specimen at every size; otherwise the edges are tried at a small size on every
            specimen, and at the largest on the first.
        checks: The names of those wanted; ``None``: all.

    Returns:
        What was checked, and what could not be.

    Raises:
        ConformanceError: If there are faults. It names every one, and has the same result.
        PlanError: If *device* is unknown, or not one that the kernel runs on.
    """
    examined = Examined(kernel, specimens, device, thorough=thorough)
    result = Conformance(examined.name, str(examined.device) if examined.device else None)
    for step in steps(examined):
        if checks is None or step.check.name in checks:
            result.add(step.check.name, step.subject, step.run())
    if result.faults:
        raise ConformanceError(str(result), result=result)
    return result
