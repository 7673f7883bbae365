"""Planning: asks every kernel about every module, decides every target, and reports all of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from torch import nn

from ..discovery import elsewhere
from ..discovery.records import KernelRecord
from ..hookspecs import resolve
from ..model_tree.places import Place
from ..patching import Patch
from ..report import Report
from .asking import Answers, Ask
from .deciding import Decider, Decision
from .explaining import explain
from .notes import notes_on
from .progress import showing
from .rules import Rules

__all__ = ["Plan", "Rules", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """What would be done to a model, decided and checked. Making a plan changes nothing.

    Attributes:
        report: The answer for every site, and why.
        patches: The replacements that the chosen kernels would make.
        classes: The class of every module that was planned, by path.
    """

    report: Report
    patches: Sequence[Patch]
    classes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.report)

    def explain(self, path: str) -> str:
        """Say what every kernel answered about the module at *path*, and which variant is nearest if none fits.

        Raises:
            PlanError: If no module at *path* was planned.
        """
        return explain(self.report, self.classes, path)


def make_plan(model: nn.Module, places: Sequence[Place], rules: Rules, ask: Ask) -> Plan:
    """Ask all kernels about all places and decide every target. Changes nothing.

    Raises:
        PlanError: If the model is to be measured but cannot be run.
    """
    start, measuring = time.perf_counter(), 0.0
    measurer = rules.measurer
    answers = Answers(rules, ask, places)
    decider = Decider(rules, answers, places)
    decisions = _side_by_side(decider, places)
    if measurer is not None:
        before = time.perf_counter()
        # If a kernel turned out to be slower, the next one may take its place, and must then be measured in its turn.
        while measurer.measure():
            decider.again()
            decisions = _decided(decider, places)
        measuring = time.perf_counter() - before
    report = Report(
        model_class=type(model).__name__,
        mode=rules.mode,
        entries=[decision.entry for decision in decisions],
        records=[record for record in rules.installed if _concerns(record, places)],
        idle=_idle(rules, places, answers.answered),
        raised=answers.raised,
        device_types=sorted({place.device_type for place in places}),
        applied=False,
        notes=notes_on(model, decisions, rules, answers.consents),
        seconds=time.perf_counter() - start - decider.compile_seconds - measuring,
        compile_seconds=decider.compile_seconds,
        measure_seconds=measuring,
    )
    classes = {path: type(place.module).__name__ for place in places for path in place.paths}
    return Plan(report, [patch for decision in decisions for patch in decision.patches], classes)


def _side_by_side(decider: Decider, places: Sequence[Place]) -> list[Decision]:
    """The decisions on *places*. If kernels have rehearsals, their programs are first compiled side by side."""
    with contextlib.ExitStack() as building:
        rehearsals = {}
        for path in sorted(decider.rehearsals):
            with contextlib.suppress(Exception):  # a rehearsal only saves time: without it, the plan is the same
                rehearsals[path] = building.enter_context(resolve(path)())
        rehearsals = {path: rehearsal for path, rehearsal in rehearsals.items() if rehearsal is not None}
        if rehearsals:
            with contextlib.ExitStack() as rehearsing, showing(places, "compiling kernels", _named) as shown:
                for rehearsal in rehearsals.values():
                    rehearsing.enter_context(rehearsal())
                decider.rehearse(shown, rehearsals.keys())
        return _decided(decider, places)


def _decided(decider: Decider, places: Sequence[Place]) -> list[Decision]:
    with showing(places, "checking kernels", _named) as shown:
        return [decision for place in shown for decision in decider.decide(place)]


def _named(place: Place) -> str:
    return place.paths[0] or "the model"


def _concerns(record: KernelRecord, places: Sequence[Place]) -> bool:
    """Whether to report *record*. Missing extras for devices that the model is not on are of no interest."""
    kernel = elsewhere(record).kernel if record.state == "not installed" else None
    return kernel is None or any(kernel.runs_on(place.device_type) for place in places)


def _idle(rules: Rules, places: Sequence[Place], answered: AbstractSet[str]) -> dict[str, str]:
    """Why kernels that are ready are of no use here, by kernel id."""
    here = sorted({place.device_type for place in places})
    planned, idle = ", ".join(here), {}
    for record in rules.installed:
        kernel = record.kernel
        if kernel is None or record.state != "ready":
            continue
        if here and not any(map(kernel.runs_on, here)):
            idle[record.kernel_id] = f"runs on {', '.join(kernel.device_types)}; this model is planned for {planned}"
        elif rules.gradients and not kernel.differentiable:
            idle[record.kernel_id] = 'has no gradient: used with mode="inference"'
        elif record not in rules.records:
            asked_for = f"only {', '.join(rules.order)} was asked for" if rules.order else "include= names no kernel"
            idle[record.kernel_id] = "left out by exclude=" if record.name in rules.excluded else asked_for
        elif record.kernel_id not in answered:
            idle[record.kernel_id] = "this model has no module with this op"
    return idle
