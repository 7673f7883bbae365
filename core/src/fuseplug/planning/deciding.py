"""One kernel for each target of each site, and a reason for every kernel that was not chosen."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..contract import Answer, Compute, Proposal, Rejection, Site, Target
from ..discovery import KernelRecord
from ..hookspecs import BaseKernel, resolve
from ..patching import Mark, Patch, patch_of, replacement_of, subject_of
from ..proposing import Question
from ..report import CheckStatus, Entry
from ..safe_access import class_name, said_by
from ..verification import Ran, Semantics, Subject, Verifier
from ..walking import Place, upwards
from .rules import Rules, kernel_of

Ask = Callable[[Sequence[Question]], Sequence[Sequence[Answer]]]
"""Puts questions to kernels, and gives their answers."""

Decision = tuple[Entry, "Patch | None"]


@dataclass(frozen=True)
class _Offered:
    """The answers of all kernels to one question."""

    proposals: Mapping[Target, Sequence[tuple[KernelRecord, Proposal]]]
    rejections: tuple[tuple[str, Rejection], ...]


class Decider:
    """The state while one plan is made: what was verified, which sites cover others, which kernels were of use."""

    def __init__(self, rules: Rules, ask: Ask) -> None:
        self._rules = rules
        self._ask = ask
        self._by_id = {record.kernel_id: record for record in rules.records}
        self._verifier = Verifier()
        self._covered: dict[str, str] = {}
        self._answered: set[str] = set()
        self._unavailable: dict[tuple[str, str], str | None] = {}
        self._offered: dict[tuple[int, str], _Offered] = {}

    def decide(self, place: Place) -> list[Decision]:
        """The answers for *place*. An error while deciding is an answer, too; then nothing of the place is replaced."""
        try:
            return list(self._answers(place))
        except Exception as error:  # noqa: BLE001 - a third party's module may raise anything, whatever is done to it
            why = Rejection(
                f"it cannot be planned: {said_by(error)}. Mend its class, or leave it out with skip=", kind="error"
            )
            return [(replace(_blank(place), rejections=(("fuseplug", why),)), None)]

    def _answers(self, place: Place) -> Iterator[Decision]:
        if _scripted(place.module):
            why = Rejection("it is TorchScript, whose methods cannot be replaced: apply before scripting")
            yield replace(_blank(place), rejections=(("fuseplug", why),)), None
            return
        if place.fault is not None:
            if covering := self._covering(place):
                yield replace(_blank(place), covered_by=covering), None
            else:
                yield replace(_blank(place), rejections=(("fuseplug", place.fault),)), None
            return
        offered = self._offered[_likeness(place)]
        if offered.proposals:
            blank = replace(_blank(place), rejections=offered.rejections)
            yield from self._decide_targets(place, blank, offered.proposals)
        elif offered.rejections:
            blank = replace(_blank(place), op=kernel_of(self._by_id[offered.rejections[0][0]]).op)
            if covering := self._covering(place):
                yield replace(blank, covered_by=covering), None
            else:
                yield replace(blank, rejections=offered.rejections), None

    def ask(self, places: Sequence[Place]) -> None:
        """Ask about *places*, once for all places that are alike."""
        first: dict[tuple[int, str], Place] = {}
        for place in places:
            if place.fault is None and not _scripted(place.module):
                first.setdefault(_likeness(place), place)
        questions = [
            Question(
                Site(place.paths[0], place.stand_in, place.device_type, self._rules.mode),
                self._rules.taking_part(place.device_type),
            )
            for place in first.values()
        ]
        for key, answers in zip(first, self._ask(questions), strict=True):
            self._offered[key] = self._sorted_out(answers)

    def _sorted_out(self, answers: Iterable[Answer]) -> _Offered:
        proposals: dict[Target, list[tuple[KernelRecord, Proposal]]] = defaultdict(list)
        rejections = []
        for answer in answers:
            record = self._by_id[answer.kernel_id]
            self._answered.add(answer.kernel_id)
            if answer.rejection is not None:
                rejections.append((answer.kernel_id, _blaming(record, answer.rejection)))
            for proposal in answer.proposals:
                proposals[proposal.target].append((record, proposal))
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
                yield replace(entry, covered_by=place.paths[0] or "the model"), None
            elif covering := self._covering(place):
                yield replace(entry, covered_by=covering), None
            else:
                entry, patch, proposal = self._decide(place, entry, target, ranked)
                if proposal is not None:
                    fused_methods |= {target.method} if target.function is None else set()
                    self._covered |= {
                        f"{above}.{path}" if above else path: above or "the model"
                        for above in place.paths
                        for path in proposal.covers
                    }
                yield entry, patch

    def _covering(self, place: Place) -> str:
        """Whose replacement no longer calls *place*, or what it is part of; ``""`` if any path still does."""
        covering = [
            next((self._covered[above] for above in upwards(path) if above in self._covered), "")
            for path in place.paths
        ]
        return covering[0] if all(covering) else ""

    def _decide(
        self, place: Place, entry: Entry, target: Target, ranked: Sequence[tuple[KernelRecord, Proposal]]
    ) -> tuple[Entry, Patch | None, Proposal | None]:
        rejections = list(entry.rejections)
        subject = subject_of(place.module, place.alike, target)
        if isinstance(subject, Rejection):
            return replace(entry, rejections=(*rejections, ("fuseplug", subject))), None, None
        for number, (record, proposal) in enumerate(ranked):
            try:
                verdict = self._verify(place, record, proposal, subject)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a kernel that calls sys.exit() ends no program
                verdict = Rejection(f"{said_by(error)} while it was verified", kind="error")
            if isinstance(verdict, Rejection):
                rejections.append((record.kernel_id, _blaming(record, verdict)))
                continue
            semantics, ran, check = verdict
            mark = Mark(record.kernel_id, semantics.adapter.variant, target, place.device_type)
            patch = patch_of(
                *(place.module, place.paths[0], mark, _compute_of(record), semantics, ran, subject),
                differentiable=kernel_of(record).differentiable,
            )
            if isinstance(patch, Rejection):
                rejections.append((record.kernel_id, _blaming(record, patch)))
                continue
            entry = replace(
                entry,
                kernel_id=record.kernel_id,
                variant=semantics.adapter.variant,
                check=check,
                watched=tuple(replacement_of(patch.function).watch.described()),
                rejections=tuple(rejections),
                outranked=tuple(other.kernel_id for other, _ in ranked[number + 1 :]),
            )
            return entry, patch, proposal
        return replace(entry, rejections=tuple(rejections)), None, None

    def _verify(
        self, place: Place, record: KernelRecord, proposal: Proposal, subject: Subject
    ) -> tuple[Semantics, Ran, CheckStatus] | Rejection:
        kernel = kernel_of(record)
        if place.device is not None and (why := self._lacks(record, place.device_type)):
            return Rejection(why, kind="unavailable")
        semantics = self._verifier.semantics(kernel, proposal, subject)
        if isinstance(semantics, Rejection):
            return semantics
        if why := kernel.refuses(semantics.adapter):
            return Rejection(f"it computes {semantics.adapter.variant}: {why}")
        if not _runs_elsewhere(record) and (why := _load_failure(kernel)):
            return Rejection(why, kind="error")
        if place.device is None:
            return semantics, Ran(semantics.accepts.dtypes), "pending"
        if not self._rules.check:
            return semantics, Ran(semantics.accepts.dtypes), "skipped"
        ran = self._verifier.kernel_check(kernel, proposal, semantics, subject, place.device)
        return ran if isinstance(ran, Rejection) else (semantics, ran, "passed")

    @property
    def compile_seconds(self) -> float:
        """How long kernels took to compile."""
        return self._verifier.compile_seconds

    @property
    def answered(self) -> AbstractSet[str]:
        """The kernels that answered for at least one site."""
        return self._answered

    def _lacks(self, record: KernelRecord, device_type: str) -> str | None:
        key = (record.kernel_id, device_type)
        if key not in self._unavailable:
            self._unavailable[key] = kernel_of(record).lacks(device_type)
        return self._unavailable[key]


def _likeness(place: Place) -> tuple[int, str]:
    return (place.alike, place.device_type)


def _blank(place: Place) -> Entry:
    return Entry(place.paths, class_name(place.module), place.device_type)


def _scripted(module: nn.Module) -> bool:
    return issubclass(type(module), torch.jit.ScriptModule)


def _blaming(record: KernelRecord, rejection: Rejection) -> Rejection:
    """Name the kernel's distribution in its error: whoever publishes that can fix it."""
    if rejection.kind != "error":
        return rejection
    return replace(rejection, reason=f"{rejection.reason} [{record.distribution} {record.version}]".replace(" ]", "]"))


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
