"""For ``measure=``: from which size on does each kernel gain here? An entry point answers; the core times nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import importlib_metadata
from torch import nn

from fuseplug_verify import said_by

from ..contract import Rejection
from ..errors import PlanError
from ..patching import Patch
from ..patching.gains import Gains
from ..report import Measurement

GROUP = "fuseplug.measurers"
"""The entry-point group. An entry names a function with the parameters of `measurer_of` that returns a `Measurer`."""

INSTALL = "pip install fuseplug-tools"


class MeasuredKind(Protocol):
    """Targets that take equally long: one replacement, on modules whose parameters have the same shapes.

    Attributes:
        figures: What was measured of these targets; empty before `Measurer.measure` was called.
    """

    figures: Sequence[Measurement]

    def gains(self, declared: Gains) -> Gains | Rejection:
        """The sizes at which the kernel is used, as measured, or else as *declared*; or why it is used at none."""


class Measurer(Protocol):
    """Measures kernels in one model while one plan is made."""

    def of(self, patch: Patch, module: nn.Module, key: Callable[[], str]) -> MeasuredKind:
        """The kind of a replacement, to be measured if it is new.

        Args:
            patch: A replacement that is not in place.
            module: The module of the replacement.
            key: Returns the hash of everything that the kernel's calls depend on; ``""`` if there is no hash.
        """

    def measure(self) -> bool:
        """Measure the kinds that are new; return whether there were any.

        Raises:
            PlanError: If the model cannot be run.
        """

    def notes(self) -> Sequence[str]:
        """What a user should know about kinds that could not be measured."""


def measurer_of(model: nn.Module, measure: object, *, device_type: str | None, gradients: bool, anew: bool) -> Measurer:
    """The measurer of kernels in *model*. Nothing is run or changed yet.

    Args:
        model: The model.
        measure: ``True``, one batch or several, as in `KernelManager`.
        device_type: Where the caller said that the model will run; ``None``: where it is.
        gradients: Whether the backward is timed, too.
        anew: Whether to ignore the times that other processes kept.

    Raises:
        PlanError: If no measurer or more than one is installed, or it cannot be imported; if *measure* is not a batch
            of the model; or if the model cannot be run where it is planned for.
    """
    entries = [*importlib_metadata.entry_points(group=GROUP)]
    if not entries:
        raise PlanError(f"measure= needs fuseplug-tools, which is not installed: {INSTALL}")
    if len(entries) > 1:
        names = sorted(entry.dist.name if entry.dist else entry.value for entry in entries)
        raise PlanError(f"measure= needs one measurer, and {' and '.join(names)} bring one: uninstall all but one")
    try:
        factory: Any = entries[0].load()
    except Exception as error:
        raise PlanError(f"measure= cannot import {entries[0].value}: {said_by(error)}; {INSTALL}") from error
    measurer: Measurer = factory(model, measure, device_type=device_type, gradients=gradients, anew=anew)
    return measurer
