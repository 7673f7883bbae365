"""Runs every check on everything that it is about, so that the faults of one check hide no others."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuseplug.errors import PlanError
from fuseplug_verify import neutral

from .attempts import KitError, raised
from .checks import CHECKS, Check
from .results import Conformance, ConformanceError, Finding
from .subjects import Depth, Examined, Specimen
from .triton import rounding_to_nearest


@dataclass(frozen=True)
class PlannedCheck:
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
        """The subject in words; ``""`` for the kernel as such."""
        return "" if self.specimen is None else self.specimen.label

    def run(self) -> list[Finding]:
        """Run the check; an error that it raises is a fault."""
        if why := self._hindered():
            return [Finding("", skipped=why)]
        findings: list[Finding] = []
        try:
            with rounding_to_nearest(), neutral(self.examined.device_type if self.examined.device else "cpu"):
                findings.extend(self._ask())
        except KeyboardInterrupt:
            raise
        except KitError as error:
            where = f"{self.check.name} of {self.examined.name}, {self.subject or 'the kernel'}"
            raise KitError(f"{where}: {error}") from error.__cause__
        except BaseException as error:  # noqa: BLE001 - third-party code may raise anything, or exit
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


QUICK = ("specimens", "numbers")
"""The checks that ``quick`` runs on every specimen that it looks at."""


def steps(examined: Examined, checks: Sequence[str] | None = None) -> list[PlannedCheck]:
    """Every check on everything that it is about: the kernel first, then specimen by specimen.

    Args:
        examined: The kernel.
        checks: The names of the checks to run; ``None`` for all.

    Raises:
        PlanError: If one of *checks* does not exist.
    """
    quick = examined.depth == "quick"
    wanted = [check for check in CHECKS if checks is None or check.name in checks]
    if unknown := [name for name in checks or () if name not in NAMES]:
        raise PlanError("; ".join(map(_unknown, unknown)) + f"; expected one of {', '.join(NAMES)}")
    found = [PlannedCheck(check, examined) for check in wanted if check.per == "kernel"]
    if quick and examined.left_out:  # specimens that are left out may have the other variants
        found = [step for step in found if step.check.name != "variants"]
    for specimen in examined.specimens:
        of_it = [check for check in wanted if check.per != "kernel"]
        if quick and specimen is not examined.chief:
            of_it = [check for check in of_it if check.name in QUICK]
        found += [PlannedCheck(check, examined, specimen) for check in of_it]
    return found


NAMES = tuple(check.name for check in CHECKS)


def _unknown(name: str) -> str:
    """The message that there is no check *name*, with the check that was probably meant."""
    word = name.strip().lower()
    near = difflib.get_close_matches(word, NAMES, n=1, cutoff=0.8)
    near = near or [known for known in NAMES if len(word) > 2 and known.startswith(word)]
    return f"there is no check {name!r}" + (f" (did you mean {near[0]!r}?)" if len(near) == 1 else "")


def announced(examined: Examined, planned: Sequence[PlannedCheck]) -> str:
    """What is about to run, in one line, because the run may take minutes."""
    asked = len({step.check.name for step in planned})
    specimens = len({step.subject for step in planned if step.subject})
    where = f"on {examined.device}" if examined.device else f"without its numbers ({examined.absent})"
    of_all = f" of {specimens + examined.left_out}" if examined.left_out else ""
    return (
        f"{examined.name} {where}: {_counted(asked, 'check')}, {_counted(specimens, 'specimen')}{of_all}, "
        f"{_counted(len(planned), 'step')}"
    )


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def check_kernel(
    kernel: Any,
    specimens: Sequence[nn.Module] | None = None,
    *,
    device: torch.device | str | None = None,
    thorough: bool = False,
    quick: bool = False,
    checks: Sequence[str] | None = None,
) -> Conformance:
    """Check *kernel* in every way that the kit knows.

    Args:
        kernel: A subclass of `BaseKernel`, or an instance.
        specimens: Small modules that the kernel fuses, at least one for each variant. If ``None``, the specimens that
            the kernel declares.
        device: Where to run the kernel. If ``None``, the first of its device types that this machine has. If it has
            none, checks that run the kernel are skipped, and all others run.
        thorough: Try every edge on every specimen at every size; otherwise the edges are tried at a small size on every
            specimen, and at the largest on the first.
        quick: Ask everything of one specimen only, and of two more whether values and gradients are right. Leave out
            sizes beyond those that the kernel names, edges at the largest, whether every variant is found, and what
            importing the kernel's functions does.
        checks: The names of the checks to run; ``None`` for all.

    Returns:
        What was checked, and what could not be checked.

    Raises:
        ConformanceError: If there are faults. Its message names every fault, and ``.result`` is the result.
        PlanError: If *device* is unknown, or not one that the kernel runs on, if one of *checks* does not exist, or if
            both *thorough* and *quick* are set.
    """
    examined = Examined(kernel, specimens, device, depth=depth_of(thorough=thorough, quick=quick))
    result = Conformance(examined.name, str(examined.device) if examined.device else None)
    for step in steps(examined, checks):
        result.add(step.check.name, step.subject, step.run())
    if result.faults:
        raise ConformanceError(str(result), result=result)
    return result


def depth_of(*, thorough: bool, quick: bool) -> Depth:
    """The depth of the checks.

    Raises:
        PlanError: If both are set.
    """
    if thorough and quick:
        raise PlanError("quick and thorough exclude each other: choose one")
    return "thorough" if thorough else "quick" if quick else "standard"
