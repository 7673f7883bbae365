"""Collects what every kernel answers about every site, with one question for all places that are alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..contract import Answer, Proposal, Rejection, Site, Target
from ..discovery.records import KernelRecord
from ..model_tree.places import Place
from .proposing import Question
from .rules import Rules

Ask = Callable[[Sequence[Question]], Sequence[Sequence[Answer]]]
"""Puts questions to kernels and returns their answers."""


@dataclass(frozen=True)
class Offers:
    """The answers of all kernels to one question.

    Attributes:
        proposals: The proposals by target, each with the record of its kernel.
        rejections: The rejections, each with the id of its kernel.
    """

    proposals: Mapping[Target, Sequence[tuple[KernelRecord, Proposal]]]
    rejections: tuple[tuple[str, Rejection], ...]


class Answers:
    """The answers about *places* by the kernels that take part.

    Args:
        rules: Which kernels take part.
        ask: Puts questions to kernels.
        places: The modules of a model.

    Attributes:
        answered: The ids of the kernels that answered about at least one site.
        consents: The words of the consents that kernels asked for.
    """

    def __init__(self, rules: Rules, ask: Ask, places: Sequence[Place]) -> None:
        self.answered: set[str] = set()
        self.consents: set[str] = set()
        self._rules = rules
        self._by_id = {record.kernel_id: record for record in rules.records}
        self._raised: dict[str, dict[str, Rejection]] = {}
        alike: dict[tuple[int, str], list[Place]] = defaultdict(list)
        for place in places:
            if place.fault is None and not is_scripted(place.module):
                alike[_likeness(place)].append(place)
        answers = ask([self._question(places_alike) for places_alike in alike.values()])
        self._offers = {key: self._sorted_out(answer, alike[key]) for key, answer in zip(alike, answers, strict=True)}

    def about(self, place: Place) -> Offers:
        """The answers about *place*, which has no fault."""
        return self._offers[_likeness(place)]

    def record_of(self, kernel_id: str) -> KernelRecord:
        """The record of a kernel that answered."""
        return self._by_id[kernel_id]

    @property
    def raised(self) -> dict[str, str]:
        """What kernels raised when they were asked, and where, by kernel id."""
        return {kernel_id: _all_raised(rejections) for kernel_id, rejections in self._raised.items()}

    def _question(self, places: Sequence[Place]) -> Question:
        """The question to every kernel about *places*, which are alike."""
        first = places[0]
        paths = tuple(path for place in places for path in place.paths)
        site = Site(first.paths[0], first.stand_in, first.device_type, self._rules.mode, paths)
        return Question(site, self._rules.taking_part(first.device_type))

    def _sorted_out(self, answers: Iterable[Answer], places: Sequence[Place]) -> Offers:
        """The *answers* about *places*, which are alike, as offers."""
        proposals: dict[Target, list[tuple[KernelRecord, Proposal]]] = defaultdict(list)
        rejections = []
        for answer in answers:
            record = self._by_id[answer.kernel_id]
            self.answered.add(answer.kernel_id)
            if answer.rejection is not None:
                rejections.append((answer.kernel_id, blaming(record, answer.rejection)))
                if answer.rejection.kind == "error":
                    raised = self._raised.setdefault(answer.kernel_id, {})
                    raised |= dict.fromkeys((place.paths[0] for place in places), rejections[-1][1])
            for proposal in answer.proposals:
                self.consents |= {proposal.consent.word} if proposal.consent is not None else set()
                proposals[proposal.target].append((record, proposal))
        if not proposals:
            # A kernel that raised has not said that the module has its op, so the site is not one of its targets.
            rejections = [(by, rejection) for by, rejection in rejections if rejection.kind != "error"]
        return Offers(proposals, tuple(rejections))


def is_scripted(module: nn.Module) -> bool:
    """Whether *module* is TorchScript, whose methods cannot be replaced."""
    return issubclass(type(module), torch.jit.ScriptModule)


def blaming(record: KernelRecord, rejection: Rejection) -> Rejection:
    """Name the kernel's distribution in its error, because the publisher of the distribution can fix the kernel."""
    if rejection.kind != "error":
        return rejection
    return replace(rejection, reason=f"{rejection.reason} [{record.distribution} {record.version}]".replace(" ]", "]"))


def _likeness(place: Place) -> tuple[int, str]:
    return (place.alike, place.device_type)


def _all_raised(raised: Mapping[str, Rejection]) -> str:
    """The first of the errors that a kernel raised, given by path, and how many more there were."""
    path, first = next(iter(raised.items()))
    more = f" and {len(raised) - 1} more" if len(raised) > 1 else ""
    return f"asked about {path or 'the model'}{more}: {first.reason}"
