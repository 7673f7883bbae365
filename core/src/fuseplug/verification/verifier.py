"""Is it right? First what the module computes, then whether the kernel computes it here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..hookspecs import BaseKernel
from ..words import Adapter, Example, Proposal, Rejection
from .comparing import Tolerance, departure, difference, distance, excess
from .neutral import neutral
from .outcome import Outcome, Subject, run

SEMANTICS_SIZE = 64
"""Elements wanted in the examples that tell variants apart: as few as the package can do with."""


@dataclass(frozen=True)
class Semantics:
    """What a site was found to compute.

    Attributes:
        adapter: The adapter of its variant.
        dtypes: The dtypes of the main input for which that was found.
        arities: The numbers of arguments for which it was.
    """

    adapter: Adapter
    dtypes: tuple[torch.dtype, ...]
    arities: tuple[int, ...]


class Verifier:
    """Checks proposals, each distinct question once. One verifier serves one plan: its answers hold while models do.

    Attributes:
        compile_seconds: How long kernels took longer the first time than the second.
    """

    def __init__(self) -> None:
        self._semantics: dict[Hashable, Semantics | Rejection] = {}
        self._checks: dict[Hashable, Rejection | None] = {}
        self.compile_seconds = 0.0

    def semantics(self, kernel: BaseKernel, proposal: Proposal, subject: Subject) -> Semantics | Rejection:
        """Find the variant whose reference equals the original, gradients too, in every mix of dtypes.

        Bit for bit, or within the tolerance where the proposal says that it cannot.
        """
        key = (kernel.reference, *_question(proposal, subject))
        if key not in self._semantics:
            with neutral():
                self._semantics[key] = _find_variant(kernel, proposal, subject)
        return self._semantics[key]

    def kernel_check(
        self, kernel: BaseKernel, proposal: Proposal, adapter: Adapter, subject: Subject, device: torch.device
    ) -> Rejection | None:
        """Run the kernel on *device* against the original there and the reference in float64; say what is wrong."""
        key = (kernel.kernel_id, device, adapter, *_question(proposal, subject))
        if key not in self._checks:
            with neutral(device.type):
                self._checks[key] = self._check(kernel, proposal, adapter, subject, device)
        return self._checks[key]

    def _check(
        self, kernel: BaseKernel, proposal: Proposal, adapter: Adapter, subject: Subject, device: torch.device
    ) -> Rejection | None:
        gradients = kernel.differentiable
        try:
            fused, reference = adapter.bind(kernel.load()), adapter.bind(kernel.load_reference())
            for size in kernel.check_sizes:
                # Two of a shape, judged when both are done: what is kept from one call must not show in another.
                examples = [example_of(proposal, proposal.mixes[0], size, number) for number in range(2)]
                found, took = [], []
                for example in examples:
                    start = time.perf_counter()
                    found.append(run(subject, fused, example, device=device, gradients=gradients))
                    took.append(time.perf_counter() - start)
                self.compile_seconds += max(0.0, took[0] - took[1])
                for example, outcome in zip(examples, found, strict=True):
                    expected = run(subject, subject.original, example, device=device, gradients=gradients)
                    truth = run(subject, reference, example, dtype=torch.float64, gradients=gradients)
                    if why := excess(outcome, expected, truth, Tolerance.of(proposal)):
                        return Rejection(
                            f"its numbers are wrong for {_describe(example)} on {device}: {why}", kind="failed"
                        )
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything
            return _raised(f"running on {device}", error)
        return None


def _question(proposal: Proposal, subject: Subject) -> tuple[Hashable, ...]:
    offered = (proposal.target, tuple(proposal.adapters), tuple(proposal.mixes), proposal.exact)
    return (*offered, subject.original, subject.alike)


def example_of(proposal: Proposal, mix: Any, size: int, number: int = 0) -> Example:
    """The example of *proposal* for one mix and size: always the same one, and another for each *number*.

    Raises:
        TypeError: If what the proposal gives is not one.
    """
    example = proposal.example(mix, size, torch.Generator().manual_seed(size + number))
    if not (isinstance(example, Example) and example.args and isinstance(example.args[0], torch.Tensor)):
        raise TypeError(f"example() must give an Example whose first argument is a tensor; it gave {example!r:.80}")
    return example


def _find_variant(kernel: BaseKernel, proposal: Proposal, subject: Subject) -> Semantics | Rejection:
    try:
        reference = kernel.load_reference()
        candidates = [(adapter, adapter.bind(reference)) for adapter in proposal.adapters]
        examples = [example_of(proposal, mix, SEMANTICS_SIZE) for mix in proposal.mixes]
    except Exception as error:  # noqa: BLE001 - a stranger's code may raise anything
        return _raised("preparing its examples", error)
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
            try:
                expected = run(subject, subject.original, example, training=training, gradients=gradients)
            except Exception as error:  # noqa: BLE001 - where the original raises there is nothing to equal
                unanswered = f"{type(error).__name__}: {error}"
                continue
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
                    f"nearest: {nearest.why}",
                    kind="unlike",
                )
            candidates = [candidate for candidate, miss in zip(candidates, misses, strict=True) if miss is None]
    if not answered:
        return Rejection(f"its own forward cannot be run on examples: {unanswered}", kind="unlike")
    dtypes = dict.fromkeys(example.args[0].dtype for example in answered)
    arities = dict.fromkeys(len(example.args) for example in answered)
    return Semantics(candidates[0][0], tuple(dtypes), tuple(arities))


class _Miss(NamedTuple):
    """What a variant does otherwise than the original, and all that it gave, if it did not raise."""

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


def _describe(example: Example) -> str:
    main = example.args[0]
    return f"{str(main.dtype).removeprefix('torch.')}{list(main.shape)}"


def _raised(doing: str, error: Exception) -> Rejection:
    return Rejection(f"{type(error).__name__} while {doing}: {error}", kind="error")
