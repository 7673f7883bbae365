"""Checks that a kernel computes on its device what the original computes there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..data import Compute, Conditions, Example, Refusal, Semantics
from ..subjects import Subject
from ..watch import Dtypes
from .comparing import Few, Tolerance, departure, excess_together
from .examples import mixes_run, raised
from .nested import tensors, with_tensors
from .outcome import Outcome
from .tried import dtypes_in
from .varying import FROZEN, describe, main_argument, transposed, variations

Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context manager in which something is run."""


class KernelCheck:
    """The check of one kernel for one original on one device.

    Args:
        semantics: What the original was found to compute.
        subject: The original.
        compute: The kernel, with the signature of the reference.
        device: Where both are run.
        gradients: Whether the kernel is run with gradients as well, or only without.
        exact: Whether the kernel must equal the original bit for bit, at more sizes.
        around: Makes the context to enter around each run of the kernel or the original.

    Attributes:
        compile_seconds: By how many seconds the kernel's first runs were slower than its second runs.
    """

    def __init__(
        self,
        semantics: Semantics,
        subject: Subject,
        compute: Compute,
        device: torch.device,
        *,
        gradients: bool = True,
        exact: bool = False,
        around: Around = contextlib.nullcontext,
    ) -> None:
        self._compute = compute
        self._candidate = semantics.candidate
        self._semantics = semantics
        self._subject = replace(subject, draws=semantics.draws, lazy=semantics.candidate.lazy)
        self._device = device
        self._gradients = gradients and not semantics.accepts.watch.no_grad
        self._exact = exact
        self._around = around
        self._tolerance = Tolerance.of(semantics.candidate)
        self._runs: list[Few] = []
        self.compile_seconds = 0.0

    def rehearse(self) -> None:
        """Call the kernel as `ran` will, as far as the kernel's programs depend on it, and ignore the results."""
        with contextlib.suppress(Exception):
            fused = self._semantics.adapter.standing_for(self._subject.original, self._compute)
            first, sizes, under = self._candidate.mixes[0], self._candidate.check_sizes, {"autocast": True}
            calls = [(mix, size, dict[str, Any]()) for mix in mixes_run(self._candidate) for size in sizes]
            for mix, size, options in (*calls, *((first, size, under) for size in sizes), (first, min(sizes), FROZEN)):
                with contextlib.suppress(Exception):
                    self._run(fused, self._candidate.example_of(mix, size), **options)

    def ran(self) -> Conditions | Refusal:
        """The conditions under which the kernel is right; or why it is refused."""
        try:
            adapter, original = self._semantics.adapter, self._subject.original
            self._fused = adapter.standing_for(original, self._compute)
            self._reference = adapter.standing_for(original, self._candidate.reference or original)
            mix, *others = mixes_run(self._candidate)
            if (wrong := self._wrong_in(mix, first=True) or self._wrong_when_real(mix)) is not None:
                return wrong
            rows = self._right_in(mix, others)
            if isinstance(rows, Refusal):
                return rows
            ranks = self._ranks(mix)
            if isinstance(ranks, Refusal):
                return ranks
            weighted = self._gradients and self._subject.module is not None  # a function has no weights to freeze
            if weighted and self._fails(self._smallest(mix), self._tolerance, **FROZEN):
                return Refusal(f"it fails on {self._device} if no gradient of a weight is wanted", kind="failed")
            contiguous = self._needs_order(mix)
            if isinstance(contiguous, Refusal):
                return contiguous
            return Conditions(rows, contiguous, self._fails_under_autocast(mix), ranks)
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything
            return raised(f"running on {self._device}", error)

    def _right_in(self, first: Any, others: Sequence[Any]) -> tuple[Dtypes, ...] | Refusal:
        """The dtypes of the mixes in which the kernel is right, as it is in the *first*.

        The guard tells mixes apart by their dtypes. So the kernel is refused if it is wrong in another mix that has the
        dtypes of the first.
        """
        now = self._dtypes(first)
        right: list[Dtypes] = [now]
        wrong: list[Dtypes] = []
        for mix in others:
            dtypes = self._dtypes(mix)
            try:
                why = self._wrong_in(mix, first=False)
            except Exception as error:  # noqa: BLE001 - it or the original may raise anything
                why = self._raises(self._smallest(mix), error)
                if why is None:
                    continue
            if why is not None and dtypes == now:
                return why
            (right if why is None else wrong).append(dtypes)
        return tuple(dtypes for dtypes in dict.fromkeys(right) if dtypes not in wrong)

    def _dtypes(self, mix: Any) -> Dtypes:
        return dtypes_in(self._semantics.accepts.typed, self._candidate.example_of(mix, 1), self._subject)

    def _wrong_in(self, mix: Any, *, first: bool) -> Refusal | None:
        """What is wrong with the kernel in *mix*, at its check sizes; in the *first* mix also at others."""
        sizes, self._runs = self._candidate.check_sizes, []
        for size in sizes:
            # Two of one shape, judged after both have run: what is kept from one call must not show in another.
            examples = [self._candidate.example_of(mix, size, number) for number in range(2 if first else 1)]
            ran, took = [], []
            for example in examples:
                start = time.perf_counter()
                ran.append((example, self._run(self._fused, example)))
                took.append(time.perf_counter() - start)
            self.compile_seconds += max(0.0, took[0] - took[1]) if first else 0.0
            if why := self._judged(ran):
                return why
        for size in self._larger_sizes() if first else ():
            example = self._candidate.example_of(mix, size)
            if why := self._judged([(example, self._run(self._fused, example))]):
                return why
        if bias := excess_together(self._runs, self._tolerance):
            return Refusal(f"its numbers are wrong for {describe(example)} on {self._device}: {bias}", kind="failed")
        return None

    def _larger_sizes(self) -> tuple[int, ...]:
        """Sizes at which the first mix is run besides the candidate's: how a kernel rounds may depend on the size."""
        largest = max(self._candidate.check_sizes)
        return (3 * largest // 2,) if not self._exact else (largest // 3, 3 * largest // 2, 7 * largest // 3)

    def _wrong_when_real(self, mix: Any) -> Refusal | None:
        """What is wrong with the tensors that lazy results become: they must equal the original's bit for bit."""
        if self._subject.lazy is None:
            return None
        example = replace(self._smallest(mix), after=None)
        for autocast in (False, True):
            outcome = self._run(self._fused, example, autocast=autocast)
            if why := outcome.difference(self._run(self._subject.original, example, autocast=autocast)):
                where = f"on {self._device}{' under autocast' if autocast else ''}"
                wrong = f"its lazy result becomes something else than the original's {where}: {why}"
                return Refusal(wrong, kind="failed")
        return None

    def _smallest(self, mix: Any) -> Example:
        return self._candidate.example_of(mix, min(self._candidate.check_sizes))

    def _ranks(self, mix: Any) -> frozenset[int] | Refusal:
        """The numbers of dimensions for which the kernel is right; or why it is wrong at some length."""
        example = self._smallest(mix)
        right, wrong = {example.args[main_argument(example)].dim()}, False
        varied = variations(example, sizes=(), numbers=(), clamps=False)
        for variation in (v for v in varied if v.kind in ("rank", "length")):
            try:
                why = self._judged([(variation.example, self._run(self._fused, variation.example))], repeated=True)
            except Exception as error:  # noqa: BLE001 - it may raise anything, and so may the original
                why = self._raises(variation.example, error)
            if variation.kind == "rank":
                right |= set() if why else {variation.rank}
                wrong |= why is not None
            elif why is not None:
                return why
        return frozenset(right) if wrong else frozenset()

    def _raises(self, example: Example, error: Exception) -> Refusal | None:
        """The refusal for an *error* of the kernel; ``None`` if the original raises, too."""
        try:
            self._run(self._subject.original, example)
        except Exception:  # noqa: BLE001 - as above
            return None
        return raised(f"running {describe(example)} on {self._device}", error)

    def _judged(self, ran: Sequence[tuple[Example, Outcome]], *, repeated: bool = False) -> Refusal | None:
        """What is wrong with the outcomes of the examples that *ran*; *repeated* is as in `Tolerance.excess`."""
        quiet = []
        for example, outcome in ran:
            expected, truth = self._run(self._subject.original, example), self._truth(example)
            on = f"{describe(example)} on {self._device}"
            # The kernel may be twice as far from the truth as the original. So the original must be near the truth.
            if departure(expected, expected, truth, self._tolerance):
                reference = self._run(self._reference, example)
                if why := self._tolerance.excess(expected, reference, truth, repeated=True):
                    return Refusal(f"for {on} it computes something else than for small inputs: {why}", kind="unlike")
            if wrong := self._wrong(example, outcome, expected, truth, on, repeated=repeated):
                return wrong
            self._runs.append(Few.of(outcome, expected, truth, self._tolerance))
            if self._gradients:
                again = self._run(self._subject.original, example, gradients=False) if self._exact else expected
                quiet.append((example, again.without_gradients(), truth.without_gradients(), on))
        # Only after the other outcomes were judged: these runs may write into their memory. Not into each other's.
        outcomes = [self._run(self._fused, example, gradients=False) for example, *_ in quiet]
        for (example, expected, truth, on), outcome in zip(quiet, outcomes, strict=True):
            if wrong := self._wrong(example, outcome, expected, truth, f"{on} without gradients", repeated=repeated):
                return wrong
        return None

    def _wrong(
        self, example: Example, outcome: Outcome, expected: Outcome, truth: Outcome, on: str, *, repeated: bool
    ) -> Refusal | None:
        if why := self._tolerance.excess(outcome, expected, truth, repeated=repeated):
            return Refusal(f"its numbers are wrong for {on}: {why}", kind="failed")
        if _is_contiguous(example) and (why := outcome.lies_otherwise(expected)):
            return Refusal(f"for {on} its {why}", kind="failed")
        if self._exact and (why := outcome.difference(expected)):
            return Refusal(f"its rounding is not the original's for {on}: {why}", kind="rounding")
        return None

    def _needs_order(self, mix: Any) -> bool | Refusal:
        """Whether the kernel is right only for contiguous inputs; or what is wrong with it for those."""
        example = self._smallest(mix)
        if _is_contiguous(example):
            # It may expect all inputs to lie alike in memory, so only one of several is transposed, too.
            main = main_argument(example)
            mixed = replace(example, args=[transposed(x) if n == main else x for n, x in enumerate(example.args)])
            mixed_fails = len(example.args) > 1 and self._fails(mixed, self._tolerance)
            return mixed_fails or self._fails(example, self._tolerance, arguments=transposed)
        contiguous = replace(example, args=with_tensors(torch.Tensor.contiguous, tuple(example.args)))
        return self._judged([(contiguous, self._run(self._fused, contiguous))]) or False

    def _fails_under_autocast(self, mix: Any) -> bool:
        tolerance = replace(self._tolerance, coarsest=torch.get_autocast_dtype(self._device.type))
        skipped = self._semantics.accepts.watch.no_autocast
        examples = (self._candidate.example_of(mix, size) for size in self._candidate.check_sizes)
        return skipped or any(self._fails(example, tolerance, autocast=True) for example in examples)

    def _fails(self, example: Example, tolerance: Tolerance, **options: Any) -> bool:
        """Whether the kernel is not right for *example*, run with *options*; or whether it or the original raises."""
        try:
            outcome = self._run(self._fused, example, **options)
            expected = self._run(self._subject.original, example, **options)
        except Exception:  # noqa: BLE001 - either may raise anything; then the original computes such calls
            return True
        rounding = self._exact and outcome.difference(expected)
        return bool(rounding or tolerance.excess(outcome, expected, self._truth(example)))

    def _run(self, function: Compute, example: Example, *, gradients: bool = True, **options: Any) -> Outcome:
        options["gradients"] = gradients and self._gradients
        with self._around():
            return self._subject.run(function, example, device=self._device, **options)

    def _truth(self, example: Example) -> Outcome:
        options: dict[str, Any] = {"dtype": torch.float64, "gradients": self._gradients}
        if self._device.type in _WITH_FLOAT64:
            # Next to a model, there may be room for the kernel only, and an operation may lack float64 on the device.
            with contextlib.suppress(RuntimeError):
                return self._subject.run(self._reference, example, device=self._device, **options)
        return self._subject.run(self._reference, example, **options)


_WITH_FLOAT64 = ("cuda",)
"""Device types that compute in float64 faster than the CPU, which took most of the time of `apply_all` on a GPU."""


def _is_contiguous(example: Example) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors(tuple(example.args)))
