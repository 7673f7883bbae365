"""The outcome of a run of the kit as data, which a catalogue of kernels can show."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import importlib_metadata
import torch

from fuseplug.devices import processor
from fuseplug_backends.triton.kernel import TritonKernel, interpreted

from .kit import PlannedCheck, steps
from .naming import Named
from .results import Conformance, Fault
from .subjects import Depth, Examined

SCHEMA = 1
"""The version of `Record.to_dict`, one more whenever a field changes its meaning or is removed."""

Verdict = Literal["passed", "failed", "partial", "unchecked"]

_ALWAYS = ("fuseplug", "fuseplug-testing", "torch")
_IF_USED = {"transformers": "transformers", "triton": "triton", "torch_npu": "torch-npu"}


@dataclass
class Row:
    """The outcome of one check.

    Attributes:
        check: The name of the check.
        passed: The number of specimens on which something was asked and nothing is wrong; 1 for a check of the kernel
            as such.
        failed: The number of specimens with faults.
        skipped: The number of specimens on which nothing could be asked.
        right: How many questions were answered right.
        faults: The faults.
        reasons: Why questions could not be put, each reason with their number.
    """

    check: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    right: int = 0
    faults: list[Fault] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, found: Conformance) -> None:
        """Count what was found on one specimen, or on the kernel as such."""
        right = sum(found.passed.values())
        self.failed += bool(found.faults)
        self.passed += bool(right and not found.faults)
        self.skipped += bool(found.skipped and not right and not found.faults)
        self.right += right
        self.faults += found.faults
        self.reasons.update(skip.why for skip in found.skipped)

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return {
            "name": self.check,
            "passed": self.passed,
            "failed": self.failed,
            "skipped": self.skipped,
            "questions_right": self.right,
            "faults": [{"where": fault.where, "what": fault.what} for fault in self.faults],
            "not_asked": [{"why": why, "questions": number} for why, number in self.reasons.items()],
        }


class Record:
    """A kernel, the steps of its examination, and their outcome.

    Args:
        named: The kernel.
        device: As for `fuseplug_testing.check_kernel`.
        depth: The depth of the checks.
        only: The names of the checks to run; ``None`` for all.

    Attributes:
        named: The kernel, and the distribution that it comes from.
        examined: The kernel under examination.
        steps: The steps to run.
        rows: The outcome so far, by check.
        seconds: How long the steps have taken.

    Raises:
        PlanError: As for `check_kernel`.
    """

    def __init__(
        self, named: Named, device: str | None = None, depth: Depth = "standard", only: Sequence[str] | None = None
    ) -> None:
        self.named = named
        self.examined = Examined(named.kernel, device=device, depth=depth)
        self.only = None if only is None else list(dict.fromkeys(only))
        self.steps = steps(self.examined, only)
        self.rows = {step.check.name: Row(step.check.name) for step in self.steps}
        self.started = datetime.datetime.now(datetime.UTC)
        self.seconds = 0.0

    def run(self, told: Callable[[int, PlannedCheck], None] = lambda *_: None) -> None:
        """Run every step, and call *told* before each with its number and the step."""
        start = time.perf_counter()
        for number, step in enumerate(self.steps):
            told(number, step)
            found = Conformance(self.examined.name)
            found.add(step.check.name, step.subject, step.run())
            self.rows[step.check.name].add(found)
            self.seconds = time.perf_counter() - start

    @property
    def faults(self) -> list[Fault]:
        """What is wrong with the kernel."""
        return [fault for row in self.rows.values() for fault in row.faults]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the kernel.

        ``"failed"`` if there are faults; ``"unchecked"`` if some checks were to run the kernel, and none of them could;
        ``"partial"`` if only some checks were wanted; else ``"passed"``.
        """
        if self.faults:
            return "failed"
        of_runs = {step.check.name for step in self.steps if step.check.runs}
        if of_runs and not any(self.rows[name].passed for name in of_runs):
            return "unchecked"
        return "passed" if self.only is None else "partial"

    @property
    def why_unchecked(self) -> str:
        """Why no check that runs the kernel could do so, if the verdict is ``"unchecked"``; else ``""``."""
        if self.verdict != "unchecked":
            return ""
        reasons = (why for step in self.steps if step.check.runs for why in self.rows[step.check.name].reasons)
        return next(reasons, "it has no specimens")

    def device(self) -> dict[str, Any] | None:
        """Where the kernel ran, as plain data; ``None`` if it did not."""
        place = self.examined.device
        if place is None:
            return None
        return {"type": place.type, "name": _name_of(place), "emulated_by": _emulator(self.examined)}

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data, which ``fuseplug check --json`` prints."""
        kernel, cls = self.examined.kernel, type(self.examined.kernel)
        declared = self.named.kernel if isinstance(self.named.kernel, type) else cls
        return {
            "schema": SCHEMA,
            "kernel": {
                "id": self.examined.name,
                "op": getattr(declared, "op", None),
                "class": f"{declared.__module__}:{declared.__qualname__}",
                "distribution": self.named.distribution,
                "version": self.named.version,
                "api": getattr(kernel, "api", None),
            },
            "verdict": self.verdict,
            "unchecked_because": self.why_unchecked or None,
            "mode": self.examined.depth,
            "only": self.only,
            "date": self.started.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "seconds": round(self.seconds, 1),
            "device": self.device(),
            "platform": f"{platform.system()} {platform.machine()}",
            "versions": {"python": platform.python_version(), **_versions()},
            "specimens": {
                "checked": [specimen.label for specimen in self.examined.specimens],
                "left_out": self.examined.left_out,
            },
            "checks": [row.to_dict() for row in self.rows.values()],
        }


def _versions() -> dict[str, str | None]:
    used: Iterable[str] = (name for module, name in _IF_USED.items() if module in sys.modules)
    return {name: _version(name) for name in (*_ALWAYS, *used)}


def _version(distribution: str) -> str | None:
    try:
        return str(importlib_metadata.version(distribution))
    except importlib_metadata.PackageNotFoundError:
        return None


def _name_of(device: torch.device) -> str | None:
    """The maker's name for *device*, as far as it is known."""
    if device.type == "cpu":
        return processor()
    name = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return None if name is None else str(name(device))


def _emulator(examined: Examined) -> str | None:
    """What stands in for the device, if anything does: a result on a stand-in is not a result on the device."""
    loading = sys.modules.get("fuseplug_host_npu.loading")
    if examined.device_type == "npu" and loading is not None and loading.is_loaded():
        return "fuseplug-host-npu"
    return "Triton's interpreter" if interpreted() and isinstance(examined.kernel, TritonKernel) else None
