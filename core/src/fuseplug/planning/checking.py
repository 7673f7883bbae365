"""Finds out once whether a kernel computes what a module computes, as far as a plan asks, and keeps the result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch

from fuseplug_verify import Conditions, Refusal, Semantics, Subject, Verifier, said_by

from ..contract import Compute, Proposal, Rejection
from ..discovery.records import KernelRecord
from ..disk_cache import DiskCache, folder
from ..fallback import declining_small
from ..hookspecs import BaseKernel, resolve
from ..model_tree.places import Place
from ..patching.candidates import candidate_of, rejection_of
from ..patching.gains import EVERY_SIZE, Gains, gains_of
from ..report import CheckStatus
from .rules import Rules, kernel_of


class Verdict(NamedTuple):
    """What was found out about one kernel for one target."""

    semantics: Semantics
    conditions: Conditions
    check: CheckStatus


class Checker:
    """Asks for verification, and remembers the answers for one plan.

    Args:
        rules: What is asked of kernels.

    Attributes:
        rehearsing: If not empty, kernels with one of these values of `BaseKernel.rehearsal` are called instead of
            checked, and all other kernels are taken to be right.
    """

    def __init__(self, rules: Rules) -> None:
        kept = DiskCache("checks", folder())
        self.rehearsing: AbstractSet[str] = frozenset()
        self._rules = rules
        self._unavailable: dict[tuple[str, str], str | None] = {}
        self._verifier = Verifier(
            kept if kept and rules.check != "always" else None,
            gradients=rules.gradients,
            exact=rules.exact,
            around=functools.partial(declining_small, not rules.every_size),
        )

    @property
    def compile_seconds(self) -> float:
        """How long kernels took to compile."""
        return self._verifier.compile_seconds

    def key(self, semantics: Semantics, device: torch.device) -> Callable[[], str]:
        """A function that returns the hash of everything that the calls of a kernel depend on."""
        return functools.partial(self._verifier.key, semantics, device)

    def verify(self, place: Place, record: KernelRecord, proposal: Proposal, subject: Subject) -> Verdict | Rejection:
        """The verdict on *proposal* of *record*'s kernel, if it computes at *place* what *subject* does; or why not."""
        kernel = kernel_of(record)
        if place.device is not None and (why := self._lacks(record, place.device_type)):
            return Rejection(why, kind="unavailable")
        candidate = candidate_of(kernel, proposal, every_size=self._rules.every_size)
        if isinstance(candidate, Rejection):
            return candidate
        semantics = self._verifier.examine(subject, candidate)
        if isinstance(semantics, Refusal):
            return rejection_of(semantics)
        if why := kernel.refuses(semantics.adapter):
            return Rejection(f"it computes {semantics.adapter.variant}: {why}")
        if not _runs_elsewhere(record) and (why := _load_failure(kernel)):
            return Rejection(why, kind="error")
        if place.device is None and self._rules.exact:
            return Rejection(
                f"whether it rounds like the original can only be found out on {place.device_type}: plan with "
                'rounding="exact" once the model is there',
                kind="unavailable",
            )
        if place.device is None:
            return Verdict(semantics, Conditions(semantics.accepts.dtypes), "pending")
        checked = self._checked(record, semantics, subject, place.device)
        return checked if isinstance(checked, Rejection) else Verdict(semantics, *checked)

    def gains(self, record: KernelRecord, semantics: Semantics, place: Place, proposal: Proposal) -> Gains | Rejection:
        """The sizes at which the kernel of *record* is used at *place*; or what is wrong with those it declares."""
        if self._rules.every_size:
            return EVERY_SIZE
        try:
            return gains_of(kernel_of(record), semantics.adapter, place.device_type, proposal.work)
        except Exception as error:  # noqa: BLE001 - a third party's method may raise anything
            return Rejection(f"{said_by(error)} (gains_from, gains_until)", kind="error")

    def _checked(
        self, record: KernelRecord, semantics: Semantics, subject: Subject, device: torch.device
    ) -> tuple[Conditions, CheckStatus] | Rejection:
        """The conditions in which the kernel of *record* is right on *device*, as far as the rules ask; or why not."""
        kernel = kernel_of(record)
        if not self._rules.check:
            return Conditions(semantics.accepts.dtypes), "skipped"
        if why := _load_failure(kernel):
            return Rejection(why, kind="error")
        question = (semantics, subject, kernel.load(), device)
        if self.rehearsing:
            if kernel.rehearsal.get(device.type) in self.rehearsing:
                self._verifier.rehearse(*question)
            return Conditions(semantics.accepts.dtypes), "pending"
        ran = self._verifier.check(*question)
        return rejection_of(ran) if isinstance(ran, Refusal) else (ran, "passed before" if ran.before else "passed")

    def _lacks(self, record: KernelRecord, device_type: str) -> str | None:
        key = (record.kernel_id, device_type)
        if key not in self._unavailable:
            self._unavailable[key] = kernel_of(record).lacks(device_type)
        return self._unavailable[key]


def _runs_elsewhere(record: KernelRecord) -> bool:
    """Whether something that *record* needs is not installed here. Its function may then not even be importable."""
    return bool(record.requires)


def compute_of(record: KernelRecord) -> Compute:
    """The function of the kernel of *record*; if it may not be importable here, one that imports it when called."""
    kernel = kernel_of(record)
    return _loaded_when_called(kernel.function) if _runs_elsewhere(record) else kernel.load()


@functools.lru_cache(maxsize=256)
def _loaded_when_called(function: str) -> Compute:
    def compute(*args: Any, **kwargs: Any) -> Any:
        return resolve(function)(*args, **kwargs)

    return compute


def _load_failure(kernel: BaseKernel) -> str:
    try:
        kernel.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's module may raise anything, or exit
        return f"{type(error).__name__} while loading {kernel.function}: {error}"
    return ""
