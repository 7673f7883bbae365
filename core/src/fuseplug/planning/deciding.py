"""One kernel for each target of each site, and a reason for every kernel that was not chosen."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fuseplug_verify import Conditions, Refusal, Semantics, Subject, Verifier, class_name, said_by

from ..candidates import candidate_of, rejection_of
from ..contract import Answer, Compute, Proposal, Rejection, Scope, Site, Target
from ..discovery import KernelRecord
from ..fallback import declining_small
from ..gains import EVERY_SIZE, TIMED, Gains, gains_of
from ..hookspecs import BaseKernel, resolve
from ..kept import Kept, folder
from ..patching import Mark, Patch, patch_around, patch_of, replacement_of, subject_of
from ..proposing import Question
from ..report import CheckStatus, Entry, Measurement
from ..walking import Place, upwards
from .rules import Rules, kernel_of

Ask = Callable[[Sequence[Question]], Sequence[Sequence[Answer]]]
"""Puts questions to kernels, and gives their answers."""


class Decision(NamedTuple):
    """An answer, and the patches that it leads to: of its target, and of what goes around a method for it."""

    entry: Entry
    patches: Sequence[Patch] = ()


class _Part(NamedTuple):
    """A target: the module that has it, the target on that module, and what is replaced there."""

    place: Place
    target: Target
    subject: Subject


@dataclass(frozen=True)
class _Offered:
    """The answers of all kernels to one question."""

    proposals: Mapping[Target, Sequence[tuple[KernelRecord, Proposal]]]
    rejections: tuple[tuple[str, Rejection], ...]


class Decider:
    """The state while one plan is made: what was verified, which sites cover others, which kernels were of use.

    Args:
        rules: How winners are decided.
        ask: Puts questions to kernels.
    """

    def __init__(self, rules: Rules, ask: Ask) -> None:
        self._rules = rules
        self._ask = ask
        self._by_id = {record.kernel_id: record for record in rules.records}
        kept = Kept("checks", folder())
        self._verifier = Verifier(
            kept if kept and rules.check != "always" else None,
            gradients=rules.gradients,
            exact=rules.exact,
            around=functools.partial(declining_small, not rules.every_size),
        )
        self._rehearsing: AbstractSet[str] = frozenset()
        self._places: dict[str, Place] = {}
        self._taken: dict[tuple[int, str], str] = {}
        self._covered: dict[str, str] = {}
        self._answered: set[str] = set()
        self._consents: set[str] = set()
        self._unavailable: dict[tuple[str, str], str | None] = {}
        self._offered: dict[tuple[int, str], _Offered] = {}
        self._raised: dict[str, dict[str, Rejection]] = {}

    def again(self) -> None:
        """Forget what was decided, but nothing that was found out."""
        self._taken.clear()
        self._covered.clear()

    def rehearse(self, places: Iterable[Place], rehearsals: AbstractSet[str]) -> None:
        """Decide *places* as if every kernel were right, and call those with one of *rehearsals* instead of a check."""
        self._rehearsing = rehearsals
        try:
            for place in places:
                self.decide(place)
        finally:
            self._rehearsing = frozenset()
            self.again()

    @property
    def rehearsals(self) -> AbstractSet[str]:
        """The `BaseKernel.rehearsal` of all kernels that may be checked."""
        device_types = {place.device_type for place in self._places.values()} if self._rules.check else set()
        kernels = [(kernel_of(record), kind) for kind in device_types for record in self._rules.taking_part(kind)]
        return {kernel.rehearsal[kind] for kernel, kind in kernels if kind in kernel.rehearsal}

    def decide(self, place: Place) -> list[Decision]:
        """The answers for *place*. An error while deciding is an answer, too; then nothing of the place is replaced."""
        try:
            return list(self._answers(place))
        except Exception as error:  # noqa: BLE001 - a third party's module may raise anything, whatever is done to it
            why = Rejection(
                f"it cannot be planned: {said_by(error)}. Mend its class, or leave it out with skip=", kind="error"
            )
            return [Decision(replace(_blank(place), rejections=(("fuseplug", why),)))]

    def _answers(self, place: Place) -> Iterator[Decision]:
        if _scripted(place.module):
            why = Rejection("it is TorchScript, whose methods cannot be replaced: apply before scripting")
            yield Decision(replace(_blank(place), rejections=(("fuseplug", why),)))
            return
        if place.fault is not None:
            if covering := self._covering(place):
                yield Decision(replace(_blank(place), covered_by=covering))
            else:
                yield Decision(replace(_blank(place), rejections=(("fuseplug", place.fault),)))
            return
        offered = self._offered[_likeness(place)]
        if offered.proposals:
            blank = replace(_blank(place), rejections=offered.rejections)
            yield from self._decide_targets(place, blank, offered.proposals)
        elif offered.rejections:
            blank = replace(_blank(place), op=kernel_of(self._by_id[offered.rejections[0][0]]).op)
            if covering := self._covering(place):
                yield Decision(replace(blank, covered_by=covering))
            else:
                yield Decision(replace(blank, rejections=offered.rejections))

    def ask(self, places: Sequence[Place]) -> None:
        """Ask about *places*, once for all places that are alike."""
        self._places = {path: place for place in places for path in place.paths}
        alike: dict[tuple[int, str], list[Place]] = defaultdict(list)
        for place in places:
            if place.fault is None and not _scripted(place.module):
                alike[_likeness(place)].append(place)
        answers = self._ask([self._question(places_alike) for places_alike in alike.values()])
        self._offered = {key: self._sorted_out(answer, alike[key]) for key, answer in zip(alike, answers, strict=True)}

    def _question(self, places: Sequence[Place]) -> Question:
        """What every kernel is asked about *places*, which are alike."""
        first = places[0]
        paths = tuple(path for place in places for path in place.paths)
        site = Site(first.paths[0], first.stand_in, first.device_type, self._rules.mode, paths)
        return Question(site, self._rules.taking_part(first.device_type))

    def _sorted_out(self, answers: Iterable[Answer], places: Sequence[Place]) -> _Offered:
        """The *answers* about *places*, which are alike."""
        proposals: dict[Target, list[tuple[KernelRecord, Proposal]]] = defaultdict(list)
        rejections = []
        for answer in answers:
            record = self._by_id[answer.kernel_id]
            self._answered.add(answer.kernel_id)
            if answer.rejection is not None:
                rejections.append((answer.kernel_id, _blaming(record, answer.rejection)))
                if answer.rejection.kind == "error":
                    raised = self._raised.setdefault(answer.kernel_id, {})
                    raised |= dict.fromkeys((place.paths[0] for place in places), rejections[-1][1])
            for proposal in answer.proposals:
                self._consents |= {proposal.consent.word} if proposal.consent is not None else set()
                proposals[proposal.target].append((record, proposal))
        if not proposals:
            # A kernel that raised has not said that the site is its business: it is no target for that.
            rejections = [each for each in rejections if each[1].kind != "error"]
        return _Offered(proposals, tuple(rejections))

    def _decide_targets(
        self, place: Place, blank: Entry, offers: Mapping[Target, Sequence[tuple[KernelRecord, Proposal]]]
    ) -> Iterator[Decision]:
        fused_methods: set[str] = set()
        # Methods before the functions they call: a method that is replaced no longer calls them.
        for target in sorted(offers, key=lambda target: (target.function is not None, str(target))):
            ranked = sorted(offers[target], key=lambda offer: self._rules.rank(offer[0], place.device_type))
            entry = replace(blank, target=target, op=kernel_of(ranked[0][0]).op)
            if target.function is not None and target.method in fused_methods:
                yield Decision(replace(entry, covered_by=place.paths[0] or "the model"))
            elif covering := self._covering(place):
                yield Decision(replace(entry, covered_by=covering))
            else:
                decisions, proposal = self._decide(place, entry, target, ranked)
                if proposal is not None:
                    fused_methods |= {target.method} if target.function is None and not target.path else set()
                    self._covered |= {
                        _joined(above, path): above or "the model" for above in place.paths for path in proposal.covers
                    }
                yield from decisions

    def _covering(self, place: Place) -> str:
        """Whose replacement no longer calls *place*, or what it is part of; ``""`` if any path still does."""
        covering = [
            next((self._covered[above] for above in upwards(path) if above in self._covered), "")
            for path in place.paths
        ]
        return covering[0] if all(covering) else ""

    def _decide(
        self, place: Place, entry: Entry, target: Target, ranked: Sequence[tuple[KernelRecord, Proposal]]
    ) -> tuple[list[Decision], Proposal | None]:
        rejections = list(entry.rejections)
        part = self._part(place, target)
        if isinstance(part, Rejection):
            return [Decision(replace(entry, rejections=(*rejections, ("fuseplug", part))))], None
        for number, (record, proposal) in enumerate(ranked):
            try:
                made = self._made(place, part, record, proposal, entry)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a kernel that calls sys.exit() ends no program
                made = Rejection(f"{said_by(error)} while it was verified", kind="error")
            if isinstance(made, Rejection):
                rejections.append((record.kernel_id, _blaming(record, made)))
                continue
            first, *others = made
            outranked = tuple(other.kernel_id for other, _ in ranked[number + 1 :])
            won = replace(first.entry, rejections=tuple(rejections), outranked=outranked)
            return [Decision(won, first.patches), *others], proposal
        return [Decision(replace(entry, rejections=tuple(rejections)))], None

    def _made(
        self, place: Place, first_part: _Part, record: KernelRecord, proposal: Proposal, entry: Entry
    ) -> list[Decision] | Rejection:
        """The decisions for all targets of *proposal*; or why it is rejected.

        Args:
            place: The site.
            first_part: What the target of *proposal* itself is.
            record: Whose proposal it is.
            proposal: For one target, and for those beside it.
            entry: The answer for the first target, as far as it is known.
        """
        if not self._rules.gradients and any(each.lazy is not None for each in proposal.all_targets):
            return Rejection(
                "its results are lazy only where gradients are recorded, and for inference none are", kind="unlike"
            )
        consent = proposal.consent
        if consent is not None and consent.word not in self._rules.allow:
            return Rejection(
                f'it needs your consent, allow=["{consent.word}"], because {consent.gives_up}', kind="consent"
            )
        decisions: list[Decision] = []
        for each in proposal.all_targets:
            part = first_part if each is proposal else self._part(place, each.target)
            made = part if isinstance(part, Rejection) else self._replaced(part, record, each, proposal.scope)
            if isinstance(made, Rejection):
                if each is proposal:
                    return made
                return replace(made, reason=f"its {each.target}, which goes with it: {made.reason}")
            decisions.append(made)
        first = decisions[0]
        patches = [*first.patches]
        if proposal.scope is not None:
            mark = Mark(record.kernel_id, first.entry.variant, Target(), place.device_type)
            around = patch_around(place.module, place.paths[0], mark, proposal.scope)
            if isinstance(around, Rejection):
                return around
            patches.append(around)
        found = replace(
            first.entry,
            paths=place.paths,
            class_name=entry.class_name,
            target=proposal.target,
            gives_up=consent.gives_up if consent is not None else "",
        )
        decisions[0] = Decision(found, patches)
        for each in proposal.all_targets:
            if (each.target.path or each is not proposal) and each.target.function is None:
                module = self._places[_joined(place.paths[0], each.target.path)].module
                self._taken[id(module), each.target.method] = place.paths[0] or "the model"
        return [Decision(replace(each.entry, op=entry.op), each.patches) for each in decisions]

    def _replaced(
        self, part: _Part, record: KernelRecord, proposal: Proposal, scope: Scope | None
    ) -> Decision | Rejection:
        """The decision for one target, whatever goes with it."""
        place, target, subject = part
        verdict = self._verify(place, record, proposal, subject)
        if isinstance(verdict, Rejection):
            return verdict
        semantics, ran, check = verdict
        if self._rehearsing:
            return Decision(_blank(place))
        kernel, gains = kernel_of(record), self._gains(record, semantics, place, proposal)
        if isinstance(gains, Rejection):
            return gains
        mark = Mark(record.kernel_id, semantics.adapter.variant, target, place.device_type)
        patched = functools.partial(
            patch_of,
            *(place.module, place.paths[0], mark, _compute_of(record), semantics, ran, subject),
            gradients=self._rules.gradients,
            traced=kernel.when_traced == "kernel" and not self._rules.loses_gradients_when_traced,
            scope=scope,
            lazy=proposal.lazy is not None,
        )
        figures: Sequence[Measurement] = ()
        # Within a scope a target is called as it is nowhere else, and is nothing by itself.
        if self._rules.measurer is not None and scope is None and place.device is not None:
            timed = patched(gains=TIMED)
            if isinstance(timed, Rejection):
                return timed
            key = functools.partial(self._verifier.key, semantics, place.device)
            kind = self._rules.measurer.of(timed, place.module, key)
            gains, figures = kind.gains(gains), kind.figures
            if isinstance(gains, Rejection):
                return gains
        patch = patched(gains=gains)
        if isinstance(patch, Rejection):
            return patch
        entry = replace(
            _blank(place),
            target=target,
            kernel_id=record.kernel_id,
            variant=semantics.adapter.variant,
            check=check,
            watched=tuple(replacement_of(patch.function).watch.described()),
            gains_from=gains.to_dict(),
            gains_until=gains.until_to_dict(),
            figures=tuple(figures),
        )
        return Decision(entry, (patch,))

    def _gains(self, record: KernelRecord, semantics: Semantics, place: Place, proposal: Proposal) -> Gains | Rejection:
        """In which sizes the kernel of *record* is used at *place*; or what is wrong with what it says."""
        if self._rules.every_size:
            return EVERY_SIZE
        try:
            return gains_of(kernel_of(record), semantics.adapter, place.device_type, proposal.work)
        except Exception as error:  # noqa: BLE001 - a third party's method may raise anything
            return Rejection(f"{said_by(error)} (gains_from, gains_until)", kind="error")

    def _part(self, place: Place, target: Target) -> _Part | Rejection:
        """What *target* of the site *place* is; or why it cannot be replaced."""
        own = replace(target, path="")
        there = place if not target.path else self._places.get(_joined(place.paths[0], target.path))
        if there is None:
            return Rejection(f"its {target.path} is no module that is planned: it is not there, or left out")
        if there.fault is not None:
            return there.fault
        taken = self._taken.get((id(there.module), target.method))
        if taken is not None and target.function is None:
            return Rejection(f"its {target} is fused already, together with {taken}")
        if target.path and (covering := self._covering(there)):
            return Rejection(f"its {target} is no longer called: {covering} is fused")
        subject = subject_of(there.module, there.alike, own)
        return subject if isinstance(subject, Rejection) else _Part(there, own, subject)

    def _verify(
        self, place: Place, record: KernelRecord, proposal: Proposal, subject: Subject
    ) -> tuple[Semantics, Conditions, CheckStatus] | Rejection:
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
                f'whether it rounds as the original is found out on {place.device_type}: plan with rounding="exact" '
                "once the model is there",
                kind="unavailable",
            )
        if place.device is None:
            return semantics, Conditions(semantics.accepts.dtypes), "pending"
        checked = self._checked(record, semantics, subject, place.device)
        return checked if isinstance(checked, Rejection) else (semantics, *checked)

    def _checked(
        self, record: KernelRecord, semantics: Semantics, subject: Subject, device: torch.device
    ) -> tuple[Conditions, CheckStatus] | Rejection:
        """What the kernel of *record* was found to compute on *device*, as far as that is asked."""
        kernel = kernel_of(record)
        if not self._rules.check:
            return Conditions(semantics.accepts.dtypes), "skipped"
        if why := _load_failure(kernel):
            return Rejection(why, kind="error")
        question = (semantics, subject, kernel.load(), device)
        if self._rehearsing:
            if kernel.rehearsal.get(device.type) in self._rehearsing:
                self._verifier.rehearse(*question)
            return Conditions(semantics.accepts.dtypes), "pending"
        ran = self._verifier.check(*question)
        return rejection_of(ran) if isinstance(ran, Refusal) else (ran, "passed before" if ran.before else "passed")

    @property
    def compile_seconds(self) -> float:
        """How long kernels took to compile."""
        return self._verifier.compile_seconds

    @property
    def answered(self) -> AbstractSet[str]:
        """The kernels that answered for at least one site."""
        return self._answered

    @property
    def raised(self) -> dict[str, str]:
        """By kernel that raised when it was asked, what it raised, and where."""
        return {kernel_id: _all_raised(each) for kernel_id, each in self._raised.items()}

    @property
    def consents(self) -> AbstractSet[str]:
        """What kernels asked the user to agree to."""
        return self._consents

    def _lacks(self, record: KernelRecord, device_type: str) -> str | None:
        key = (record.kernel_id, device_type)
        if key not in self._unavailable:
            self._unavailable[key] = kernel_of(record).lacks(device_type)
        return self._unavailable[key]


def _likeness(place: Place) -> tuple[int, str]:
    return (place.alike, place.device_type)


def _blank(place: Place) -> Entry:
    return Entry(place.paths, class_name(place.module), place.device_type)


def _joined(path: str, below: str) -> str:
    return f"{path}.{below}" if path and below else path or below


def _scripted(module: nn.Module) -> bool:
    return issubclass(type(module), torch.jit.ScriptModule)


def _blaming(record: KernelRecord, rejection: Rejection) -> Rejection:
    """Name the kernel's distribution in its error: whoever publishes that can fix it."""
    if rejection.kind != "error":
        return rejection
    return replace(rejection, reason=f"{rejection.reason} [{record.distribution} {record.version}]".replace(" ]", "]"))


def _all_raised(raised: Mapping[str, Rejection]) -> str:
    """What a kernel raised first, given all of it by path, and how often."""
    path, first = next(iter(raised.items()))
    more = f" and {len(raised) - 1} more modules" if len(raised) > 1 else ""
    return f"asked about {path or 'the model'}{more}: {first.reason}"


def _runs_elsewhere(record: KernelRecord) -> bool:
    """Whether what *record* needs is not installed here, where its function may not even be importable."""
    return bool(record.requires)


def _compute_of(record: KernelRecord) -> Compute:
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
