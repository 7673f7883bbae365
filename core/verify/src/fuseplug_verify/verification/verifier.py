"""Verifies candidates: first what the module computes, then whether the kernel computes the same here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import nn

from ..data import Candidate, Compute, Conditions, Refusal, Semantics
from ..subjects import Subject
from ..watch import Expected
from .evidence import key_of, stable
from .examining import Examination
from .examples import raised
from .kernel_check import Around, KernelCheck
from .neutral import neutral
from .original import read_original


class Store(Protocol):
    """Keeps plain data for other processes, each under a hash."""

    def get(self, key: str) -> Any:
        """Return what was kept under *key*; ``None`` if nothing was."""

    def put(self, key: str, answer: Any) -> None:
        """Keep *answer* under *key*."""


class Verifier:
    """Answers each distinct question once. Its answers hold as long as the modules are not changed.

    Args:
        kept: The store where results of checks are looked up, and kept for other processes; by default, none.
        gradients: Whether kernels are run with gradients as well, or only without.
        exact: Whether a kernel must equal the original bit for bit, at more sizes.
        around: Makes the context to enter around each run of a kernel or an original on its device.

    Attributes:
        compile_seconds: How long rehearsals took, and by how much first runs of kernels were slower than second runs.
    """

    def __init__(
        self,
        kept: Store | None = None,
        *,
        gradients: bool = True,
        exact: bool = False,
        around: Around = contextlib.nullcontext,
    ) -> None:
        self._kept = kept
        self._options = {"gradients": gradients, "exact": exact}
        self._around = around
        self._semantics: dict[Hashable, Semantics | Refusal] = {}
        self._checks: dict[Hashable, Conditions | Refusal] = {}
        self._rehearsed: set[Hashable] = set()
        self.compile_seconds = 0.0

    def examine(self, subject: Subject, candidate: Candidate) -> Semantics | Refusal:
        """Find the variant whose reference equals the original, gradients included, in every kind of call.

        Reference and original must be equal bit for bit, or within the tolerance if the candidate says ``exact=False``.
        """
        subject = replace(subject, lazy=candidate.lazy)
        key = _question(candidate, subject)
        if key not in self._semantics:
            with neutral():
                self._semantics[key] = _find_semantics(candidate, subject)
        semantics = self._semantics[key]
        return semantics if isinstance(semantics, Refusal) else replace(semantics, candidate=candidate)

    def rehearse(self, semantics: Semantics, subject: Subject, compute: Compute, device: torch.device) -> None:
        """Call *compute* as `check` will, unless the result of the check is known."""
        key = _check_question(semantics, subject, compute, device)
        if key not in self._checks and key not in self._rehearsed:
            self._rehearsed.add(key)
            with neutral(device.type):
                _, before = self._before(semantics, device)
                if before is not None:
                    self._checks[key] = before
                else:
                    start = time.perf_counter()
                    self._check(semantics, subject, compute, device).rehearse()
                    self.compile_seconds += time.perf_counter() - start

    def check(
        self, semantics: Semantics, subject: Subject, compute: Compute, device: torch.device
    ) -> Conditions | Refusal:
        """Compare *compute* on *device* with the original there and the reference in float64; say when it is right."""
        key = _check_question(semantics, subject, compute, device)
        if key not in self._checks:
            with neutral(device.type):
                self._checks[key] = self._checked(semantics, subject, compute, device)
        return self._checks[key]

    def key(self, semantics: Semantics, device: torch.device) -> str:
        """The hash of all that the kernel's calls depend on, however it was checked; ``""`` if there is none."""
        with neutral(device.type):
            return key_of(semantics, device, ())

    def _check(self, semantics: Semantics, subject: Subject, compute: Compute, device: torch.device) -> KernelCheck:
        return KernelCheck(semantics, subject, compute, device, **self._options, around=self._around)

    def _before(self, semantics: Semantics, device: torch.device) -> tuple[str, Conditions | None]:
        """The key under which the result is kept, ``""`` if it cannot be, and the result that was kept, if any."""
        if self._kept is None:
            return "", None
        key = key_of(semantics, device, tuple(self._options.values()))
        return key, Conditions.kept(self._kept.get(key)) if key else None

    def _checked(
        self, semantics: Semantics, subject: Subject, compute: Compute, device: torch.device
    ) -> Conditions | Refusal:
        key, before = self._before(semantics, device)
        if before is not None:
            return before
        check = self._check(semantics, subject, compute, device)
        result = check.ran()
        self.compile_seconds += check.compile_seconds
        if self._kept is not None and key and isinstance(result, Conditions):
            self._kept.put(key, result.to_dict())
        return result


def examine(subject: nn.Module | Subject, candidate: Candidate) -> Semantics | Refusal:
    """Find which variant of *candidate* the original is, and for which calls: on the CPU, on a copy of the module.

    Args:
        subject: A module, whose class's ``forward`` is the original; or the `Subject` of another method or a function.
        candidate: What the original may be, and the examples that show it.
    """
    what = _subject_of(subject)
    return what if isinstance(what, Refusal) else Verifier().examine(what, candidate)


def check(
    semantics: Semantics,
    subject: nn.Module | Subject,
    compute: Compute,
    device: torch.device | str = "cpu",
    *,
    gradients: bool = True,
) -> Conditions | Refusal:
    """Compare *compute* on *device* with the original there and the reference in float64; say when it is right.

    Args:
        semantics: What `examine` returned for *subject*.
        subject: The module, or the `Subject` of a method or function.
        compute: The replacement. It has the signature of the reference, or of the original if there is no reference.
        device: Where it is to run.
        gradients: Whether gradients are compared, too.
    """
    what = _subject_of(subject)
    if isinstance(what, Refusal):
        return what
    return Verifier(gradients=gradients).check(semantics, what, compute, torch.device(device))


def _subject_of(subject: nn.Module | Subject) -> Subject | Refusal:
    return subject if isinstance(subject, Subject) else Subject.of_method(subject, type(subject).forward)


def _question(candidate: Candidate, subject: Subject) -> tuple[Hashable, ...]:
    offered = tuple(
        tuple(value) if isinstance(value := getattr(candidate, item.name), Sequence) else value
        for item in fields(candidate)
        if item.name not in ("example", "check_sizes", "identity", "packages")
    )
    if subject.module is None:
        return (*offered, subject.original, _data_in(candidate.example))
    return (*offered, subject.original, subject.alike if subject.alike is not None else Expected.same(subject.module))


def _data_in(example: Any) -> str:
    """The plain data with which *example*, a partial or a closure, was made; ``""`` if it holds anything else.

    One function serves modules of several sizes, and then each size is a question of its own.
    """
    with contextlib.suppress(Exception):
        cells = [cell.cell_contents for cell in getattr(example, "__closure__", None) or ()]
        parts = [*getattr(example, "args", ()), *getattr(example, "keywords", {}).values(), *cells]
        return stable([_data_in(part) if callable(part) else part for part in parts])
    return ""


def _check_question(
    semantics: Semantics, subject: Subject, compute: Compute, device: torch.device
) -> tuple[Hashable, ...]:
    candidate = semantics.candidate
    who = (Expected.same(compute), candidate.identity, tuple(candidate.check_sizes))
    return (*who, device, semantics.adapter, *_question(candidate, replace(subject, lazy=candidate.lazy)))


def _find_semantics(candidate: Candidate, subject: Subject) -> Semantics | Refusal:
    try:
        reference = candidate.reference or subject.original
        variants = [(adapter, adapter.standing_for(subject.original, reference)) for adapter in candidate.adapters]
        examples = [candidate.example_of(mix) for mix in candidate.mixes]
    except Exception as error:  # noqa: BLE001 - third-party code may raise anything
        return raised("preparing its examples", error)
    reading = read_original(subject, examples)
    if isinstance(reading, Refusal):
        return reading
    # The children that examples bring may draw random numbers, to show in which order they are called.
    subject = replace(subject, draws=bool(reading.draws or examples[0].children))
    try:
        return Examination(candidate, subject, reading, variants, examples).semantics()
    except Exception as error:  # noqa: BLE001 - a third party's tensor may be unreadable, or its example unfit to vary
        return raised("it was verified", error)
