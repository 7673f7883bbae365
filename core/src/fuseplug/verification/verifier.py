"""Verifies proposals: first what the module computes, then whether the kernel computes the same here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from ..contract import Example, Proposal, Rejection
from ..hookspecs import BaseKernel
from ..kept import NOWHERE, Kept
from .branches import Branches
from .comparing import Tolerance, departure, difference, distance
from .evidence import Evidence
from .examining import Candidate, Examination, Semantics, forbidden, read_original
from .examples import SEMANTICS_SIZE, example_of, raised
from .kernel_check import KernelCheck, Ran
from .nested import tensors
from .neutral import neutral
from .outcome import Outcome, Subject, run


class Verifier:
    """Checks proposals, each distinct question once. Its answers are valid for one plan only.

    Args:
        kept: Where results of kernel checks are looked up, and kept for other processes; by default nowhere.
        gradients: As `KernelCheck` takes it.
        exact: As `KernelCheck` takes it.
        every_size: As `KernelCheck` takes it.

    Attributes:
        compile_seconds: What rehearsals took, and by how much the first runs of kernels were slower than their second.
    """

    def __init__(
        self, kept: Kept = NOWHERE, *, gradients: bool = True, exact: bool = False, every_size: bool = False
    ) -> None:
        self._kept = kept
        self._how = {"gradients": gradients, "exact": exact, "every_size": every_size}
        self._semantics: dict[Hashable, Semantics | Rejection] = {}
        self._checks: dict[Hashable, Ran | Rejection] = {}
        self._rehearsed: set[Hashable] = set()
        self.compile_seconds = 0.0

    def semantics(self, kernel: BaseKernel, proposal: Proposal, subject: Subject) -> Semantics | Rejection:
        """Find the variant whose reference equals the original, gradients included, in every kind of call.

        They must be equal bit for bit, or within the tolerance if the proposal says ``exact=False``.
        """
        subject = replace(subject, lazy=proposal.lazy)
        key = (kernel.reference, *_question(proposal, subject))
        if key not in self._semantics:
            with neutral():
                self._semantics[key] = _find_semantics(kernel, proposal, subject)
        return self._semantics[key]

    def rehearse(
        self, kernel: BaseKernel, proposal: Proposal, semantics: Semantics, subject: Subject, device: torch.device
    ) -> None:
        """Call the kernel as `kernel_check` will, unless the result is known."""
        key, check = self._check(kernel, proposal, semantics, subject, device)
        if key not in self._checks and key not in self._rehearsed:
            self._rehearsed.add(key)
            with neutral(device.type):
                _, before = self._before(check)
                if before is not None:
                    self._checks[key] = before
                else:
                    start = time.perf_counter()
                    check.rehearse()
                    self.compile_seconds += time.perf_counter() - start

    def kernel_check(
        self, kernel: BaseKernel, proposal: Proposal, semantics: Semantics, subject: Subject, device: torch.device
    ) -> Ran | Rejection:
        """Run the kernel on *device* against the original there and the reference in float64; say what is wrong."""
        key, check = self._check(kernel, proposal, semantics, subject, device)
        if key not in self._checks:
            with neutral(device.type):
                self._checks[key] = self._checked(check)
        return self._checks[key]

    def _check(
        self, kernel: BaseKernel, proposal: Proposal, semantics: Semantics, subject: Subject, device: torch.device
    ) -> tuple[Hashable, KernelCheck]:
        subject = replace(subject, lazy=proposal.lazy)
        key = (kernel.kernel_id, device, semantics.adapter, *_question(proposal, subject))
        return key, KernelCheck(kernel, proposal, semantics, subject, device, **self._how)

    def key(
        self, kernel: BaseKernel, proposal: Proposal, semantics: Semantics, subject: Subject, device: torch.device
    ) -> str:
        """The hash of all that the kernel's calls depend on, however it was checked; ``""`` if it has none."""
        with neutral(device.type):
            return KernelCheck(kernel, proposal, semantics, subject, device).key()

    def _before(self, check: KernelCheck) -> tuple[str, Ran | None]:
        """What the result is kept under, if it can be, and what was kept."""
        key = check.key() if self._kept else ""
        return key, Ran.kept(self._kept.get(key)) if key else None

    def _checked(self, check: KernelCheck) -> Ran | Rejection:
        key, before = self._before(check)
        if before is not None:
            return before
        found = check.ran()
        self.compile_seconds += check.compile_seconds
        if key and isinstance(found, Ran):
            self._kept.put(key, found.to_dict())
        return found


def _question(proposal: Proposal, subject: Subject) -> tuple[Hashable, ...]:
    offered = tuple(
        tuple(value) if isinstance(value := getattr(proposal, each.name), Sequence) else value
        for each in fields(proposal)
        if each.name not in ("example", "covers", "beside")
    )
    return (*offered, subject.original, subject.alike)


def _find_semantics(kernel: BaseKernel, proposal: Proposal, subject: Subject) -> Semantics | Rejection:
    try:
        reference = kernel.load_reference()
        candidates = [(adapter, adapter.standing_for(subject.original, reference)) for adapter in proposal.adapters]
        examples = [example_of(proposal, mix, SEMANTICS_SIZE) for mix in proposal.mixes]
    except Exception as error:  # noqa: BLE001 - third-party code may raise anything
        return raised("preparing its examples", error)
    reading = read_original(subject, examples)
    if isinstance(reading, Rejection):
        return reading
    if (why := forbidden(reading, [*examples[0].children])) is not None:
        return why
    # The children that examples bring may draw, to show in which order they are called.
    subject = replace(subject, draws=bool(reading.random or examples[0].children))
    branches, evidence = Branches(reading.codes), Evidence()
    found = _surviving(proposal, subject, candidates, examples, branches, evidence)
    if isinstance(found, Rejection):
        return found
    try:
        semantics = Examination(proposal, subject, reading, *found, branches).semantics()
        if isinstance(semantics, Rejection):
            return semantics
        evidence.code(reading.codes)
        return replace(semantics, evidence=evidence.digest())
    except Exception as error:  # noqa: BLE001 - a third party's example may not bear to be varied
        return raised("varying its examples", error)


def _surviving(
    proposal: Proposal,
    subject: Subject,
    candidates: Sequence[Candidate],
    examples: Sequence[Example],
    branches: Branches,
    evidence: Evidence,
) -> tuple[Sequence[Candidate], Sequence[Example]] | Rejection:
    """The *candidates* that equal the original on every example, and those on which it could be run."""
    unanswered = ""
    answered: list[Example] = []
    # The first mix is tried with the other training flag too, and without gradients: a module may be planned in one
    # way and run in another.
    flags: list[bool | None] = [None]
    if subject.module is not None:
        flags.append(not examples[0].attributes.get("training", subject.module.training))
    ways = [(training, gradients) for gradients in (True, False) for training in flags]
    for number, example in enumerate(examples):
        for training, gradients in ways if number == 0 else ways[:1]:
            how: dict[str, Any] = {"training": training, "gradients": gradients}
            try:
                expected = run(subject, subject.original, example, **how, watching=branches)
            except Exception as error:  # noqa: BLE001 - where the original raises there is nothing to equal
                unanswered = f"{type(error).__name__}: {error}"
                continue
            branches.keep()
            evidence.ran(expected)
            if not any(example is each for each in answered):
                answered.append(example)
            misses = [
                _miss(subject, proposal, adapter.variant, function, example, expected, training, gradients)
                for adapter, function in candidates
            ]
            if all(misses):
                # Those that came this far are the closest.
                nearest = min(filter(None, misses), key=lambda miss: miss.distance(expected))
                return Rejection(
                    f"computes none of the known variants; of {len(proposal.adapters)} tried, {nearest.variant} is "
                    f"nearest: {nearest.why} ({_circumstances(subject, example, training, gradients)})",
                    kind="unlike",
                )
            candidates = [candidate for candidate, miss in zip(candidates, misses, strict=True) if miss is None]
    if not answered:
        return Rejection(f"its own forward cannot be run on examples: {unanswered}", kind="unlike")
    return candidates, answered


def _circumstances(subject: Subject, example: Example, training: bool | None, gradients: bool) -> str:
    """The dtypes, the training flag and the grad mode of a run, for people."""
    dtypes = dict.fromkeys(
        str(t.dtype).removeprefix("torch.") for t in tensors(tuple(example.args)) if t.is_floating_point()
    )
    said = [f"for {' and '.join(dtypes)}"] if dtypes else []
    if subject.module is not None:
        flag = training
        if flag is None:
            flag = bool(example.attributes.get("training", subject.module.training))
        said.append("in training" if flag else "in eval")
    return ", ".join([*said, "with gradients" if gradients else "without gradients"])


class _Miss(NamedTuple):
    """How a variant differs from the original, and its results, if it did not raise."""

    variant: str
    why: str
    found: Outcome | None = None

    def distance(self, expected: Outcome) -> float:
        return math.inf if self.found is None else distance(self.found, expected)


def _miss(
    subject: Subject,
    proposal: Proposal,
    variant: str,
    function: Callable[..., Any],
    example: Example,
    expected: Outcome,
    training: bool | None,
    gradients: bool,
) -> _Miss | None:
    try:
        found = run(subject, function, example, training=training, gradients=gradients)
        if proposal.exact:
            why = difference(found, expected)
        else:
            truth = run(subject, function, example, dtype=torch.float64, training=training, gradients=gradients)
            why = departure(expected, found, truth, Tolerance.of(proposal))
    except Exception as error:  # noqa: BLE001 - a variant that does not fit the module may raise anything
        return _Miss(variant, f"its reference raises {type(error).__name__}: {error}")
    return _Miss(variant, why, found) if why else None
