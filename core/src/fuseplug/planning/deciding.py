"""Chooses one kernel for each target of each site, with a reason for every kernel that was not chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from fuseplug_verify import Subject, said_by

from ..contract import Proposal, Rejection, Scope, Target
from ..discovery.records import KernelRecord
from ..model_tree.places import Place, upwards
from ..patching import Mark, Patch, patch_around, patch_of, replacement_of, subject_of
from ..patching.gains import TIMED
from ..report import Entry, Measurement
from .asking import Answers, blaming, is_scripted
from .checking import Checker, compute_of
from .rules import Rules, kernel_of


class Decision(NamedTuple):
    """An answer, and the patches that it leads to: for its target, and for the scope around a method, if any."""

    entry: Entry
    patches: Sequence[Patch] = ()


class _Part(NamedTuple):
    """A target: the module that has it, the target on that module, and what is replaced there."""

    place: Place
    target: Target
    subject: Subject


class Decider:
    """Decides on all places of a model, and keeps track of covered sites and taken targets.

    Args:
        rules: How winners are decided.
        answers: What kernels answered about *places*.
        places: The modules of the model.
    """

    def __init__(self, rules: Rules, answers: Answers, places: Sequence[Place]) -> None:
        self._rules = rules
        self._answers = answers
        self._checker = Checker(rules)
        self._places = {path: place for place in places for path in place.paths}
        self._taken: dict[tuple[int, str], str] = {}
        self._covered: dict[str, str] = {}

    @property
    def compile_seconds(self) -> float:
        """How long kernels took to compile."""
        return self._checker.compile_seconds

    def again(self) -> None:
        """Forget what was decided, but keep what was found out."""
        self._taken.clear()
        self._covered.clear()

    def rehearse(self, places: Iterable[Place], rehearsals: AbstractSet[str]) -> None:
        """Decide *places* as if every kernel were right. Call kernels with one of *rehearsals* instead of a check."""
        self._checker.rehearsing = rehearsals
        try:
            for place in places:
                self.decide(place)
        finally:
            self._checker.rehearsing = frozenset()
            self.again()

    @property
    def rehearsals(self) -> AbstractSet[str]:
        """The `BaseKernel.rehearsal` of all kernels that may be checked."""
        device_types = {place.device_type for place in self._places.values()} if self._rules.check else set()
        kernels = [(kernel_of(record), kind) for kind in device_types for record in self._rules.taking_part(kind)]
        return {kernel.rehearsal[kind] for kernel, kind in kernels if kind in kernel.rehearsal}

    def decide(self, place: Place) -> list[Decision]:
        """The answers for *place*. An error while deciding is an answer, too; then nothing in *place* is replaced."""
        try:
            return list(self._decided(place))
        except Exception as error:  # noqa: BLE001 - a third party's module may raise anything, whatever is done to it
            why = Rejection(
                f"it cannot be planned: {said_by(error)}. Correct its class, or leave it out with skip=", kind="error"
            )
            return [Decision(replace(_blank(place), rejections=(("fuseplug", why),)))]

    def _decided(self, place: Place) -> Iterator[Decision]:
        if is_scripted(place.module):
            why = Rejection("it is TorchScript, whose methods cannot be replaced: apply before scripting")
            yield Decision(replace(_blank(place), rejections=(("fuseplug", why),)))
            return
        if place.fault is not None:
            if covering := self._covering(place):
                yield Decision(replace(_blank(place), covered_by=covering))
            else:
                yield Decision(replace(_blank(place), rejections=(("fuseplug", place.fault),)))
            return
        offers = self._answers.about(place)
        if offers.proposals:
            blank = replace(_blank(place), rejections=offers.rejections)
            yield from self._decide_targets(place, blank, offers.proposals)
        elif offers.rejections:
            blank = replace(_blank(place), op=kernel_of(self._answers.record_of(offers.rejections[0][0])).op)
            if covering := self._covering(place):
                yield Decision(replace(blank, covered_by=covering))
            else:
                yield Decision(replace(blank, rejections=offers.rejections))

    def _decide_targets(
        self, place: Place, blank: Entry, offers: Mapping[Target, Sequence[tuple[KernelRecord, Proposal]]]
    ) -> Iterator[Decision]:
        fused_methods: set[str] = set()
        # Methods before the functions that they call: a replaced method no longer calls them.
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
        """The site whose replacement no longer calls *place* or a module above; ``""`` if a path is still called."""
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
                replaced = self._all_replaced(place, part, record, proposal, entry)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a kernel that calls sys.exit() must not end the program
                replaced = Rejection(f"{said_by(error)} while it was verified", kind="error")
            if isinstance(replaced, Rejection):
                rejections.append((record.kernel_id, blaming(record, replaced)))
                continue
            first, *others = replaced
            # A kernel may have made several proposals for this target. Its other proposals need no explanation.
            outranked = tuple(other.kernel_id for other, _ in ranked[number + 1 :] if other is not record)
            rejected = tuple(rejection for rejection in rejections if rejection[0] != record.kernel_id)
            won = replace(first.entry, rejections=rejected, outranked=outranked)
            return [Decision(won, first.patches), *others], proposal
        return [Decision(replace(entry, rejections=tuple(rejections)))], None

    def _all_replaced(
        self, place: Place, first_part: _Part, record: KernelRecord, proposal: Proposal, entry: Entry
    ) -> list[Decision] | Rejection:
        """The decisions for all targets of *proposal*; or why it is rejected.

        Args:
            place: The site.
            first_part: The part that the target of *proposal* itself is.
            record: The record of the kernel that made *proposal*.
            proposal: The proposal for one target, and for those beside it.
            entry: The answer for the first target, as far as it is known.
        """
        if not self._rules.gradients and any(one.lazy is not None for one in proposal.all_targets):
            return Rejection(
                "its results are lazy only where gradients are recorded, and for inference none are", kind="unlike"
            )
        consent = proposal.consent
        if consent is not None and consent.word not in self._rules.allow:
            return Rejection(
                f'it needs your consent, allow=["{consent.word}"], because {consent.gives_up}', kind="consent"
            )
        decisions: list[Decision] = []
        for one in proposal.all_targets:
            part = first_part if one is proposal else self._part(place, one.target)
            decision = part if isinstance(part, Rejection) else self._replaced(part, record, one, proposal.scope)
            if isinstance(decision, Rejection):
                if one is proposal:
                    return decision
                return replace(decision, reason=f"its {one.target}, which goes with it: {decision.reason}")
            decisions.append(decision)
        first = decisions[0]
        patches = [*first.patches]
        if proposal.scope is not None:
            mark = Mark(record.kernel_id, first.entry.variant, Target(), place.device_type)
            around = patch_around(place.module, place.paths[0], mark, proposal.scope)
            if isinstance(around, Rejection):
                return around
            patches.append(around)
        entry_of_first = replace(
            first.entry,
            paths=place.paths,
            class_name=entry.class_name,
            target=proposal.target,
            gives_up=consent.gives_up if consent is not None else "",
        )
        decisions[0] = Decision(entry_of_first, patches)
        for one in proposal.all_targets:
            if (one.target.path or one is not proposal) and one.target.function is None:
                module = self._places[_joined(place.paths[0], one.target.path)].module
                self._taken[id(module), one.target.method] = place.paths[0] or "the model"
        return [Decision(replace(decision.entry, op=entry.op), decision.patches) for decision in decisions]

    def _replaced(
        self, part: _Part, record: KernelRecord, proposal: Proposal, scope: Scope | None
    ) -> Decision | Rejection:
        """The decision for one target, apart from the targets that go with it; or why it is rejected."""
        place, target, subject = part
        verdict = self._checker.verify(place, record, proposal, subject)
        if isinstance(verdict, Rejection):
            return verdict
        semantics, conditions, check = verdict
        if self._checker.rehearsing:
            return Decision(_blank(place))
        kernel, gains = kernel_of(record), self._checker.gains(record, semantics, place, proposal)
        if isinstance(gains, Rejection):
            return gains
        mark = Mark(record.kernel_id, semantics.adapter.variant, target, place.device_type)
        patched = functools.partial(
            patch_of,
            *(place.module, place.paths[0], mark, compute_of(record), semantics, conditions, subject),
            gradients=self._rules.gradients,
            traced=kernel.when_traced == "kernel" and not self._rules.loses_gradients_when_traced,
            scope=scope,
            lazy=proposal.lazy is not None,
        )
        figures: Sequence[Measurement] = ()
        # Within a scope, a target is called as nowhere else, so it cannot be timed alone.
        if self._rules.measurer is not None and scope is None and place.device is not None:
            timed = patched(gains=TIMED)
            if isinstance(timed, Rejection):
                return timed
            kind = self._rules.measurer.of(timed, place.module, self._checker.key(semantics, place.device))
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

    def _part(self, place: Place, target: Target) -> _Part | Rejection:
        """The part that *target* of the site *place* is; or why it cannot be replaced."""
        on_module = replace(target, path="")
        below = place if not target.path else self._places.get(_joined(place.paths[0], target.path))
        if below is None:
            return Rejection(f"its {target.path} is not a planned module: it does not exist, or was left out")
        if below.fault is not None:
            return below.fault
        taken = self._taken.get((id(below.module), target.method))
        if taken is not None and target.function is None:
            return Rejection(f"its {target} is fused already, together with {taken}")
        if target.path and (covering := self._covering(below)):
            return Rejection(f"its {target} is no longer called: {covering} is fused")
        subject = subject_of(below.module, below.alike, on_module)
        return subject if isinstance(subject, Rejection) else _Part(below, on_module, subject)


def _blank(place: Place) -> Entry:
    return Entry(place.paths, type(place.module).__name__, place.device_type)


def _joined(path: str, below: str) -> str:
    return f"{path}.{below}" if path and below else path or below
