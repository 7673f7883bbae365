"""Does a kernel compute, on its device, what the original does there?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..hookspecs import BaseKernel
from ..words import Example, Proposal, Rejection
from .comparing import Tolerance, departure, excess
from .examining import Semantics, dtypes_in
from .examples import example_of, raised
from .outcome import AS_USUAL, Handing, Outcome, Subject, run
from .varying import main_argument, transposed


@dataclass(frozen=True)
class Ran:
    """What a kernel was found to compute on its device.

    Attributes:
        dtypes: As `Semantics.dtypes`: those in which it was run.
        contiguous: Whether its results lie in memory as the original's only if the input is contiguous.
        no_autocast: Whether it computes what the original does only without autocast.
    """

    dtypes: tuple[tuple[torch.dtype, ...], ...]
    contiguous: bool = False
    no_autocast: bool = False


class KernelCheck:
    """One kernel for one original on one device.

    Attributes:
        compile_seconds: How long the kernel took longer the first time than the second.
    """

    def __init__(
        self, kernel: BaseKernel, proposal: Proposal, semantics: Semantics, subject: Subject, device: torch.device
    ) -> None:
        self._kernel = kernel
        self._proposal = proposal
        self._semantics = semantics
        self._subject = replace(subject, draws=semantics.draws)
        self._device = device
        self._tolerance = Tolerance.of(proposal)
        self.compile_seconds = 0.0

    def ran(self) -> Ran | Rejection:
        """In what the kernel is right; or why it is not taken."""
        try:
            self._fused = self._semantics.adapter.bind(self._kernel.load())
            self._reference = self._semantics.adapter.bind(self._kernel.load_reference())
            rows = []
            for number, mix in enumerate(self._mixes()):
                wrong = self._wrong_in(mix, beyond=number == 0)
                if wrong is None:
                    rows.append(dtypes_in(self._semantics.typed, example_of(self._proposal, mix, 1), self._subject))
                elif number == 0:
                    return wrong
            mix = self._proposal.mixes[0]
            return Ran(tuple(dict.fromkeys(rows)), self._needs_order(mix), self._fails_under_autocast(mix))
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything
            return raised(f"running on {self._device}", error)

    def _mixes(self) -> Iterator[Any]:
        """Those in which the module may be called as it stands: as it is, and with what autocast gives it."""
        first, *others = self._proposal.mixes
        yield first
        as_it_is = example_of(self._proposal, first, 1)
        usual = {_main_dtype(as_it_is), torch.get_autocast_dtype(self._device.type)}
        for mix in others:
            example = example_of(self._proposal, mix, 1)
            if _main_dtype(example) in usual and _held_dtypes(example) == _held_dtypes(as_it_is):
                yield mix

    def _wrong_in(self, mix: Any, *, beyond: bool) -> Rejection | None:
        """What is wrong with the kernel in *mix*, at the sizes that it names; and, with *beyond*, at a larger one."""
        sizes = self._kernel.check_sizes
        for size in sizes:
            # Two of a shape, judged when both are done: what is kept from one call must not show in another.
            examples = [example_of(self._proposal, mix, size, number) for number in range(2)]
            found, took = [], []
            for example in examples:
                start = time.perf_counter()
                found.append(self._run(self._fused, example))
                took.append(time.perf_counter() - start)
            self.compile_seconds += max(0.0, took[0] - took[1])
            for example, outcome in zip(examples, found, strict=True):
                if why := self._judged(example, outcome):
                    return why
        if beyond:
            example = example_of(self._proposal, mix, 3 * max(sizes) // 2)
            return self._judged(example, self._run(self._fused, example))
        return None

    def _judged(self, example: Example, outcome: Outcome) -> Rejection | None:
        expected = self._run(self._subject.original, example)
        truth = self._truth(example)
        on = f"{describe(example)} on {self._device}"
        # The kernel may be twice as far from the truth as the original. So that must be near it.
        if departure(expected, expected, truth, self._tolerance):
            own = self._run(self._reference, example)
            if why := excess(expected, own, truth, self._tolerance):
                return Rejection(f"for {on} it computes something else than for small inputs: {why}", kind="unlike")
        why = excess(outcome, expected, truth, self._tolerance)
        if not why and outcome.strides != expected.strides:
            why = f"its results lie in memory with strides {outcome.strides} instead of {expected.strides}"
        return Rejection(f"its numbers are wrong for {on}: {why}", kind="failed") if why else None

    def _needs_order(self, mix: Any) -> bool:
        """Whether the original keeps the order in which its input lies in memory, and the kernel does not."""
        example = example_of(self._proposal, mix, min(self._kernel.check_sizes))
        handing = Handing(arguments=transposed)
        found = self._run(self._fused, example, handing=handing)
        expected = self._run(self._subject.original, example, handing=handing)
        wrong = excess(found, expected, self._truth(example), self._tolerance)
        return bool(wrong) or found.strides != expected.strides

    def _fails_under_autocast(self, mix: Any) -> bool:
        if self._semantics.watch.no_autocast:
            return True
        coarse = torch.get_autocast_dtype(self._device.type)
        tolerance = replace(self._tolerance, coarsest=coarse)
        for size in self._kernel.check_sizes:
            example = example_of(self._proposal, mix, size)
            try:
                found = self._run(self._fused, example, autocast=True)
            except Exception:  # noqa: BLE001 - a kernel may raise anything; the original is there for such calls
                return True
            expected = self._run(self._subject.original, example, autocast=True)
            if excess(found, expected, self._truth(example), tolerance):
                return True
        return False

    def _run(
        self, function: Callable[..., Any], example: Example, *, handing: Handing = AS_USUAL, autocast: bool = False
    ) -> Outcome:
        gradients = self._kernel.differentiable
        how: dict[str, Any] = {"handing": handing, "autocast": autocast}
        return run(self._subject, function, example, device=self._device, gradients=gradients, **how)

    def _truth(self, example: Example) -> Outcome:
        gradients = self._kernel.differentiable
        return run(self._subject, self._reference, example, dtype=torch.float64, gradients=gradients)


def describe(example: Example) -> str:
    """The main input of *example*, in short."""
    main = example.args[main_argument(example)]
    return f"{str(main.dtype).removeprefix('torch.')}{list(main.shape)}"


def _main_dtype(example: Example) -> torch.dtype:
    dtype: torch.dtype = example.args[main_argument(example)].dtype
    return dtype


def _held_dtypes(example: Example) -> list[torch.dtype]:
    """The dtypes of what *example* has for the module's own tensors and children."""
    children = (value for child in example.children.values() for value in child.parameters())
    return [value.dtype for value in (*example.parameters.values(), *children)]
