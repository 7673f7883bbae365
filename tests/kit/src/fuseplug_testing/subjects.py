"""The subjects of the checks: a kernel, its specimens, and each target that the kernel would replace in them."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fuseplug.contract import Answer, Mode, Proposal, Rejection, Scope, Site
from fuseplug.devices import KNOWN, Destination, destination, present
from fuseplug.discovery.kernel_faults import faults
from fuseplug.errors import PlanError
from fuseplug.hookspecs import BaseKernel, resolve
from fuseplug.model_tree.places import Place, walk
from fuseplug.patching import Mark, Patch, patch_of, put_on, subject_of
from fuseplug.patching.candidates import candidate_of, rejection_of
from fuseplug.patching.tally import listening
from fuseplug_verify import (
    Candidate,
    Conditions,
    Example,
    Outcome,
    Refusal,
    Semantics,
    Subject,
    Tolerance,
    Verifier,
)

from .attempts import Raised, attempt, foreign, raised
from .importing.process_state import ProcessState, owners_of
from .results import Finding
from .torch_private import tree_map as mapped
from .wrappers import Around, followed_by

Depth = Literal["quick", "standard", "thorough"]
"""How much is checked: `fuseplug_testing.kit.check_kernel` says what each depth leaves out."""

QUICK_SPECIMENS = 3
"""How many specimens ``quick`` looks at: finding out what a specimen computes takes up to three seconds."""


class CountedCompute:
    """A kernel's function that counts its calls, to prove that the kernel ran."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self.compute = compute
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and compute it."""
        self.calls += 1
        return self.compute(*args, **kwargs)


class Examined:
    """A kernel under examination.

    Args:
        kernel: The kernel's class, or an instance.
        specimens: Modules that the kernel fuses; if ``None``, the specimens that it declares.
        device: Where to run the kernel; if ``None``, where it says that it runs.
        depth: The depth of the checks.

    Attributes:
        kernel: The instance; ``None`` if the class is not a kernel, and `broken` says why.
        device: Where the kernel's numbers can be checked; ``None`` if nowhere, and `absent` says why.
        device_type: The device type that its sites name.
        specimens: The specimens that the kernel is checked on.
        left_out: How many more specimens there are.
        no_specimens: Why there are no specimens.
        before: The state of the process before anything was asked or run.
    """

    def __init__(
        self,
        kernel: Any,
        specimens: Sequence[nn.Module] | None = None,
        device: torch.device | str | None = None,
        *,
        depth: Depth = "standard",
    ) -> None:
        cls = kernel if isinstance(kernel, type) else type(kernel)
        self.broken = faults(cls)
        self.name = str(getattr(cls, "kernel_id", cls.__name__))
        self.kernel: BaseKernel | None = None
        self.device: torch.device | None = None
        self.device_type, self.absent, self.no_specimens = "cpu", "it is not a kernel", ""
        self.depth = depth
        self.specimens: list[Specimen] = []
        self.left_out = 0
        if self.broken:
            return
        self.kernel = kernel() if isinstance(kernel, type) else kernel
        self.device_type, self.device, self.absent = device_for(self.kernel, device)
        given, self.no_specimens = _specimens(self.kernel) if specimens is None else (list(specimens), "")
        every = [Specimen(self, number, module) for number, module in enumerate(given)]
        self.specimens = _spread(every, QUICK_SPECIMENS) if depth == "quick" else every
        self.left_out = len(every) - len(self.specimens)
        self.before = ProcessState({owner: None for module in given for owner in owners_of(module)})

    @property
    def mode(self) -> Mode:
        """``"training"`` if the kernel says that it has gradients, else ``"inference"``."""
        return "training" if self.sound.differentiable else "inference"

    @functools.cached_property
    def chief(self) -> Specimen | None:
        """The specimen with the most checks: the first one on which the kernel has anything to do."""
        return next((specimen for specimen in self.specimens if not _idle(specimen)), next(iter(self.specimens), None))

    @property
    def sound(self) -> BaseKernel:
        """The kernel, for callers that know that it is one."""
        if self.kernel is None:
            raise TypeError("; ".join(self.broken))
        return self.kernel


class Specimen:
    """One module that the kernel fuses, and the kernel's answers about it.

    Attributes:
        label: The number and class of the specimen.
        module: The module, which is never changed.
    """

    def __init__(self, examined: Examined, number: int, module: nn.Module) -> None:
        self.examined = examined
        self.number = number
        self.module = module
        self.label = f"{number} {type(module).__name__}"
        self.settled: dict[str, bool] = {}

    @functools.cached_property
    def places(self) -> list[Place]:
        """The places of its modules, its own first."""
        kind = self.examined.device_type
        return walk(self.module, only=(), skip=(), device=Destination(kind, self.examined.device))

    def sites(self) -> Iterator[tuple[Place, Site]]:
        """The sites that the kernel is asked about, each with its place."""
        for place in self.places:
            yield place, Site(place.paths[0], place.stand_in, place.device_type, self.examined.mode, place.paths)

    @functools.cached_property
    def answers(self) -> list[tuple[Place, Answer]]:
        """The kernel's answers about the specimen's sites, each with the place of the site."""
        said = [(place, self.examined.sound.propose(site=site)) for place, site in self.sites()]
        return [(place, answer) for place, answer in said if answer is not None]

    @functools.cached_property
    def _decided(self) -> tuple[list[Case], list[str], dict[str, str]]:
        cases, why_not, declined, verifier = [], [], {}, Verifier()
        for place, answer in self.answers:
            if answer.rejection is not None:
                why_not.append(f"rejected: {answer.rejection.reason}")
            for proposal, part in self._parts(answer):
                case = self._case(verifier, place, part, proposal.scope)
                if isinstance(case, Rejection):
                    why_not.append(case.reason)
                elif why := self.examined.sound.refuses(case.semantics.adapter):
                    declined[case.semantics.adapter.variant] = why
                else:
                    cases.append(case)
        return cases, why_not, declined

    @staticmethod
    def _parts(answer: Answer) -> Iterator[tuple[Proposal, Proposal]]:
        """Each proposal of *answer* with every target that is replaced along with its own."""
        for proposal in answer.proposals:
            yield from ((proposal, part) for part in proposal.all_targets)

    def _case(self, verifier: Verifier, site: Place, proposal: Proposal, scope: Scope | None) -> Case | Rejection:
        path = proposal.target.path
        wanted = ".".join(part for part in (site.paths[0], path) if part)
        place = next((place for place in self.places if wanted in place.paths), None)
        if place is None:
            return Rejection(f"its {path} is no module of it")
        proposal = replace(proposal, target=replace(proposal.target, path=""))
        subject = subject_of(place.module, place.alike, proposal.target)
        if isinstance(subject, Rejection):
            return subject
        candidate = candidate_of(self.examined.sound, proposal)
        if isinstance(candidate, Rejection):
            return candidate
        semantics = verifier.examine(subject, candidate)
        if isinstance(semantics, Refusal):
            return rejection_of(semantics)
        subject = replace(subject, draws=semantics.draws, lazy=proposal.lazy)
        return Case(self.examined, place, proposal, subject, semantics, scope)

    @property
    def cases(self) -> list[Case]:
        """Every target of the specimen that the kernel would replace."""
        return self._decided[0]

    @property
    def why_not(self) -> list[str]:
        """Why other targets are left alone."""
        return self._decided[1]

    @property
    def declined(self) -> dict[str, str]:
        """The variants on the specimen that the kernel declines to compute, each with the kernel's reason."""
        return self._decided[2]

    @property
    def all_declined(self) -> str:
        """Why the kernel has nothing to do on the specimen, in the kernel's words; ``""`` if it has something to do."""
        return "" if self.cases else "; ".join(f"declined, {variant}: {why}" for variant, why in self.declined.items())

    @property
    def claimed(self) -> dict[str, None]:
        """The variants that the kernel's proposals name."""
        return dict.fromkeys(
            adapter.variant
            for _, answer in self.answers
            for _, part in self._parts(answer)
            for adapter in part.adapters
        )

    @property
    def consents(self) -> list[str]:
        """The words of consent that the kernel asks for on the specimen: the kit agrees to everything."""
        found = (proposal.consent for _, answer in self.answers for proposal in answer.proposals)
        return list(dict.fromkeys(consent.word for consent in found if consent is not None))


@dataclass(frozen=True, eq=False)
class Case:
    """One target of one specimen, with the variant that it was found to be.

    Attributes:
        examined: The kernel.
        place: The module that has the target.
        proposal: The kernel's proposal for this target. The target has no path, because *place* is its module.
        subject: The original, ready to be run.
        semantics: What the original computes.
        scope: The calls of the site during which the target is replaced; ``None``: always.
    """

    examined: Examined
    place: Place
    proposal: Proposal
    subject: Subject
    semantics: Semantics
    scope: Scope | None = None

    @property
    def label(self) -> str:
        """The variant, the path, and the target if it is not the module's forward."""
        target = str(self.proposal.target)
        path = self.place.paths[0]
        parts = [self.semantics.adapter.variant, path and f"at {path}", "" if target == "forward" else target]
        return " ".join(part for part in parts if part)

    @property
    def device(self) -> torch.device:
        """Where the case is run."""
        return self.examined.device or torch.device("cpu")

    @property
    def gradients(self) -> bool:
        """Whether gradients are compared."""
        return self.examined.sound.differentiable

    @functools.cached_property
    def first_of_variant(self) -> bool:
        """Whether no earlier case has the same variant, or all cases are to be checked alike."""
        variant = self.semantics.adapter.variant
        cases = (case for specimen in self.examined.specimens for case in specimen.cases)
        return (
            self.examined.depth == "thorough"
            or next(case for case in cases if case.semantics.adapter.variant == variant) is self
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes at which numbers are checked; sizes above the smallest only on the first specimen of a variant."""
        sizes = tuple(self.examined.sound.check_sizes)
        return sizes if self.first_of_variant else (min(sizes),)

    @property
    def beyond(self) -> int:
        """A size far above all sizes that the kernel names, because its author had those in mind.

        Eight times the largest, but at least 2²⁰ elements and at most 2²²; twice the largest if that is more. A check
        at this size takes a second or two, and about 500 MB for gradients in float64.
        """
        largest = max(self.examined.sound.check_sizes)
        return max(2 * largest, min(8 * largest, 1 << 22), 1 << 20)

    @property
    def edge_sizes(self) -> tuple[int, ...]:
        """The sizes at which edges are tried: the large one may cost compilations, so only on the first specimen."""
        return (Candidate.SMALL,) if self.examined.depth == "quick" else self.repeated_sizes

    @property
    def repeated_sizes(self) -> tuple[int, ...]:
        """The sizes at which a usual call is repeated: the large one costs no compilation after the check of sizes."""
        depth, chief = self.examined.depth, self.examined.chief
        large = depth == "thorough" or (chief is not None and chief.cases[:1] == [self])
        return (Candidate.SMALL, max(self.examined.sound.check_sizes)) if large else (Candidate.SMALL,)

    @functools.cached_property
    def compute(self) -> CountedCompute:
        """The kernel's function, counting its calls."""
        return CountedCompute(foreign(self.examined.sound.load)())

    @functools.cached_property
    def original(self) -> Callable[..., Any]:
        """The original."""
        return foreign(self.subject.original)

    @functools.cached_property
    def fused(self) -> Callable[..., Any]:
        """The kernel in the place of the original."""
        return self._standing_for(self.compute)

    @functools.cached_property
    def reference(self) -> Callable[..., Any]:
        """The reference in the place of the original."""
        return self._standing_for(foreign(self.examined.sound.load_reference)())

    def _standing_for(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return foreign(foreign(self.semantics.adapter.standing_for)(self.subject.original, compute))

    @functools.cached_property
    def patch(self) -> Patch:
        """The replacement with its guard, but without its scope, because the kit calls it by itself."""
        return self._patch(None)

    @property
    def guarded(self) -> Callable[..., Any]:
        """The function of `patch`."""
        return foreign(self.patch.function)

    @functools.cached_property
    def guarded_in_scope(self) -> Callable[..., Any]:
        """The function of the replacement with its guard and scope, as it is put on a module."""
        return foreign(self._patch(self.scope).function)

    def _patch(self, scope: Scope | None) -> Patch:
        kernel = self.examined.sound
        ran, place = Conditions(self.semantics.accepts.dtypes), self.place
        mark = Mark(kernel.kernel_id, self.semantics.adapter.variant, self.proposal.target, place.device_type)
        patch = patch_of(
            *(place.module, place.paths[0], mark, kernel.load(), self.semantics, ran, self.subject),
            gradients=self.gradients,
            traced=kernel.when_traced == "kernel",
            scope=scope,
            lazy=self.proposal.lazy is not None,
        )
        if isinstance(patch, Rejection):
            raise TypeError(patch.reason)
        return patch

    def example(self, mix: Any = None, size: int = Candidate.SMALL, number: int = 0) -> Example:
        """Example *number* of *mix*, or of the first mix if ``None``."""
        example = self.semantics.candidate.example_of(self.proposal.mixes[0] if mix is None else mix, size, number)
        return example if example.after is None else replace(example, after=foreign(example.after))

    def values_only(self, example: Example) -> tuple[Example, bool]:
        """*example* for a comparison of values alone, and whether gradients are recorded in it.

        A result can be lazy only while gradients are recorded.
        """
        if self.proposal.lazy is None:
            return example, False

        def detached(result: Any) -> Any:
            return mapped(lambda value: foreign(value.detach)() if isinstance(value, Tensor) else value, result)

        return replace(example, after=followed_by(example.after or _as_it_is, detached)), self.gradients

    def double(self, example: Example | None = None) -> nn.Module:
        """A separate, unfused module like the specimen's, with the values of an example."""
        example = example or self.example()
        if self.subject.module is None:
            return copy.deepcopy(self.place.module).to(self.device)
        return self.subject.twin(example).to(self.device)

    def fuse(self, module: nn.Module) -> None:
        """Put the replacement on *module*, which is like the specimen's module."""
        put_on([replace(self.patch, path="", module_ref=weakref.ref(module))])

    def original_on(self, example: Example, **how: Any) -> Outcome:
        """Run the original."""
        return self.subject.run(self.original, example, **self._how(how))

    def kernel_on(
        self,
        example: Example,
        function: Callable[..., Any] | None = None,
        around: Around | None = None,
        **how: Any,
    ) -> Outcome:
        """Run the kernel, or *function* in its place; *around* is as in `compare`."""
        return self.subject.run(*_put_around(around, function or self.fused, example), **self._how(how))

    def truth_on(self, example: Example, **how: Any) -> Outcome:
        """Run the reference in float64, on the CPU."""
        return self.subject.run(self.reference, example, **{**self._how(how), "dtype": torch.float64, "device": "cpu"})

    def compare(
        self,
        where: str,
        example: Example,
        *,
        function: Callable[..., Any] | None = None,
        original: Callable[..., Any] | None = None,
        around: Around | None = None,
        around_original: bool = True,
        surroundings: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        coarsest: torch.dtype | None = None,
        usual: Outcome | None = None,
        **how: Any,
    ) -> Finding:
        """Compare the kernel with the original and with the reference in float64, by the tolerance of the proposal.

        Args:
            where: What the finding is about.
            example: The example to run on.
            function: The function that takes the place of the original; the kernel if ``None``.
            original: The function to run as the original; the original itself if ``None``.
            around: A wrapper around both functions, including what the example does with their results.
            around_original: Whether *around* wraps the original, too.
            surroundings: A context for the kernel's run alone.
            coarsest: As in `fuseplug_verify.Tolerance`.
            usual: As in `fuseplug_verify.Tolerance.excess`.
            **how: As in `fuseplug_verify.Subject.run`.
        """
        how = self._how(how)
        usual_way = around if around_original else None
        expected = attempt(lambda: self.kernel_on(example, original or self.original, usual_way, **how))
        if isinstance(expected, Raised):
            return expected.by_the_original(where)
        truth = attempt(lambda: self.truth_on(example, **how))
        if isinstance(truth, Raised):
            return Finding(where, fault=f"the reference raises {truth} in float64, where the original does not")
        with surroundings(), given_back() as reasons:
            found = attempt(lambda: self.kernel_on(example, function, around, **how))
        if isinstance(found, Raised):
            return found.by_the_kernel(where)
        fault = self.excess(found, expected, truth, coarsest, usual=usual)
        return Finding(where, fault=fault, skipped="" if fault else by_the_original(reasons))

    def excess(
        self,
        found: Outcome,
        expected: Outcome,
        truth: Outcome,
        coarsest: torch.dtype | None = None,
        times: float = 1.0,
        usual: Outcome | None = None,
    ) -> str:
        """Where the error of *found* exceeds the tolerance of the proposal; ``""`` if nowhere.

        Args:
            found: The outcome of the kernel.
            expected: The outcome of the original.
            truth: The outcome of the reference in float64.
            coarsest: As in `fuseplug_verify.Tolerance`.
            times: How many times larger the example is than the largest for which the proposal's tolerance was stated.
                Sums over all rows, such as the gradient of a weight, then have as many times more terms. Each partial
                sum is rounded, and these errors add up like a random walk, with the root of their number.
            usual: As in `fuseplug_verify.Tolerance.excess`.
        """
        stated = Tolerance.of(self.semantics.candidate)
        working = stated.working_roundings * math.sqrt(times)
        tolerance = replace(stated, working_roundings=working, coarsest=coarsest)
        return tolerance.excess(found, expected, truth, usual)

    def random(self, size: int) -> bool:
        """Whether the original draws random numbers for an example of *size*, or is not reproducible."""
        outcomes = []
        for seed in (1, 2):

            def reseeded(*args: Any, seed: int = seed, **kwargs: Any) -> Any:
                torch.manual_seed(seed)
                return self.original(*args, **kwargs)

            # draws=True, whatever the original's code says, so that the generators are put back.
            subject = replace(self.subject, draws=True)
            outcomes.append(subject.run(reseeded, self.example(size=size), **self._how({})))
        return bool(outcomes[0].difference(outcomes[1]))

    def _how(self, how: dict[str, Any]) -> dict[str, Any]:
        return {"device": self.device, "gradients": self.gradients, **how}


def _as_it_is(value: Any) -> Any:
    return value


def _put_around(
    around: Around | None, function: Callable[..., Any], example: Example
) -> tuple[Callable[..., Any], Example]:
    """The function and example to run, so that *around* also wraps what *example* does with the result."""
    if around is None:
        return function, example
    return around(followed_by(function, example.after or _as_it_is)), replace(example, after=None)


@contextlib.contextmanager
def given_back() -> Iterator[dict[str, None]]:
    """Collect why guards leave calls to originals: comparing an original with itself shows nothing."""
    reasons: dict[str, None] = {}

    def heard(_: Any, why: Callable[[], str]) -> None:
        reasons[why()] = None

    with listening(heard):
        yield reasons


def by_the_original(reasons: Iterable[str]) -> str:
    """Why the kernel did not compute, if guards had *reasons* to call the original; ``""`` if they had none."""
    said = "; ".join(reasons)
    return f"such calls are the original's: {said}" if said else ""


def device_for(kernel: BaseKernel, wanted: torch.device | str | None) -> tuple[str, torch.device | None, str]:
    """The device type to examine *kernel* for; the device, if the kernel can run here, or else why it cannot.

    Raises:
        PlanError: If *wanted* is unknown, or not one that the kernel runs on.
    """
    kinds = tuple(kernel.device_types) or ("cpu",)
    if wanted is not None:
        place = destination(wanted, KNOWN | set(kernel.device_types))
        if not kernel.runs_on(place.type):
            raise PlanError(f"{kernel.kernel_id} runs on {', '.join(kinds)}, not on {place.type}: name one of those")
        kinds = (place.type,)
    here = next((kind for kind in kinds if present(kind)), None)
    if here is None:
        return kinds[0], None, f"it runs on {', '.join(kinds)}, and none is here"
    if why := kernel.lacks(here):
        return here, None, why
    return here, torch.device(here if wanted is None else wanted), ""


def _spread(specimens: list[Specimen], most: int) -> list[Specimen]:
    """At most *most* of *specimens*, evenly spread, with the first: similar specimens follow each other."""
    step = max(1.0, len(specimens) / most)
    return [specimens[int(number * step)] for number in range(min(most, len(specimens)))]


def _idle(specimen: Specimen) -> bool:
    try:
        return not specimen.cases
    except Exception:  # noqa: BLE001 - the checks will say what it is
        return False


def _specimens(kernel: BaseKernel) -> tuple[list[nn.Module], str]:
    if not kernel.specimens:
        return [], (
            'it names no specimens: declare specimens = "package.module:function", a function that returns small '
            "modules which the kernel fuses, at least one for each variant; or hand check_kernel some"
        )
    try:
        made = list(resolve(kernel.specimens)())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's function may raise anything, or exit
        return [], f"{kernel.specimens} raises {raised(error)}"
    if not made or not all(isinstance(module, nn.Module) for module in made):
        return [], f"{kernel.specimens} must return modules, at least one, not {made!r:.80}"
    return made, ""
