"""Planning: asks every kernel about every module, decides every target, and reports all of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import nn

from fuseplug_verify import attributes_of, class_name

from ..discovery import KernelRecord, elsewhere
from ..hookspecs import resolve
from ..measurer import Measurer
from ..patching import Patch, computes_past
from ..report import Report
from ..walking import Place
from .deciding import Ask, Decider, Decision
from .explaining import explain
from .progress import showing
from .rules import Rules

__all__ = ["Plan", "Rules", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """What would be done to a model, decided and checked. Making a plan changes nothing.

    Attributes:
        report: The answer for every site, and why.
        patches: The replacements that the chosen kernels would make.
        classes: By path, the class of every module that was planned.
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
        PlanError: If the model is to be measured, and cannot be run.
    """
    start, measuring = time.perf_counter(), 0.0
    measurer = rules.measurer
    decider = Decider(rules, ask)
    decider.ask(places)
    decisions = _side_by_side(decider, places)
    if measurer is not None:
        begun = time.perf_counter()
        # Where a kernel turned out to be slower, the next may come, which then has to be measured in its turn.
        while measurer.measure():
            decider.again()
            decisions = _decided(decider, places)
        measuring = time.perf_counter() - begun
    report = Report(
        model_class=class_name(model),
        mode=rules.mode,
        entries=[decision.entry for decision in decisions],
        records=[record for record in rules.installed if _concerns(record, places)],
        idle=_idle(rules, places, decider.answered),
        raised=decider.raised,
        device_types=sorted({place.device_type for place in places}),
        applied=False,
        notes=[
            *_notes(model, decisions, rules.installed),
            *_passed_by(decisions),
            *_unmeasured(measurer, decisions),
            *_cost_of_rounding(rules, decisions),
            *_untraced(rules, decisions),
            *_unasked(rules.allow, decider.consents),
        ],
        seconds=time.perf_counter() - start - decider.compile_seconds - measuring,
        compile_seconds=decider.compile_seconds,
        measure_seconds=measuring,
    )
    classes = {path: class_name(place.module) for place in places for path in place.paths}
    return Plan(report, [patch for decision in decisions for patch in decision.patches], classes)


def _side_by_side(decider: Decider, places: Sequence[Place]) -> list[Decision]:
    """What was decided, where compilers may have run side by side for it."""
    with contextlib.ExitStack() as building:
        rehearsals = {}
        for path in sorted(decider.rehearsals):
            with contextlib.suppress(Exception):  # a kernel's own way to save time: without it the plan is the same
                rehearsals[path] = building.enter_context(resolve(path)())
        rehearsals = {path: rehearsal for path, rehearsal in rehearsals.items() if rehearsal is not None}
        if rehearsals:
            with contextlib.ExitStack() as rehearsing, showing(places, "compiling kernels", _named) as shown:
                for rehearsal in rehearsals.values():
                    rehearsing.enter_context(rehearsal())
                decider.rehearse(shown, rehearsals.keys())
        return _decided(decider, places)


def _decided(decider: Decider, places: Sequence[Place]) -> list[Decision]:
    with showing(places, "checking kernels", _named) as each:
        return [decision for place in each for decision in decider.decide(place)]


def _named(place: Place) -> str:
    return place.paths[0] or "the model"


def _unmeasured(measurer: Measurer | None, decisions: Sequence[Decision]) -> list[str]:
    """A note on each kernel that had to be used as it declares, though its user wanted it measured."""
    if measurer is None:
        return []
    patches = [patch for decision in decisions for patch in decision.patches if patch.target.around]
    around = dict.fromkeys(patch.kernel_id for patch in patches)
    return [
        *measurer.notes(),
        *(
            f"not measured: {kernel_id}, because it serves some calls of the whole model only, and is nothing by "
            "itself; it is used from the size that it declares"
            for kernel_id in around
        ),
    ]


def _concerns(record: KernelRecord, places: Sequence[Place]) -> bool:
    """Whether to report *record*. Missing extras for devices that the model is not on are of no interest."""
    kernel = elsewhere(record).kernel if record.state == "not installed" else None
    return kernel is None or any(kernel.runs_on(place.device_type) for place in places)


def _idle(rules: Rules, places: Sequence[Place], answered: AbstractSet[str]) -> dict[str, str]:
    """Why kernels that are ready are of no use here."""
    here = sorted({place.device_type for place in places})
    idle = {}
    for record in rules.installed:
        kernel = record.kernel
        if kernel is None or record.state != "ready":
            continue
        if not any(kernel.runs_on(device_type) for device_type in here):
            idle[record.kernel_id] = (
                f"runs on {', '.join(kernel.device_types)}; this model is planned for {', '.join(here)}"
            )
        elif rules.gradients and not kernel.differentiable:
            idle[record.kernel_id] = 'has no gradient: used with mode="inference"'
        elif record not in rules.records:
            asked_for = f"only {', '.join(rules.order) or 'none'} was asked for"
            idle[record.kernel_id] = "left out by exclude=" if record.name in rules.excluded else asked_for
        elif record.kernel_id not in answered:
            idle[record.kernel_id] = "no module of this model is its business"
    return idle


def _cost_of_rounding(rules: Rules, decisions: Sequence[Decision]) -> list[str]:
    """Where kernels must be the originals bit for bit, a note on what that left unfused."""
    if not rules.exact:
        return []
    entries = [decision.entry for decision in decisions]
    cost = sum(not each.fused and any(why.kind == "rounding" for _, why in each.rejections) for each in entries)
    kept = sum(each.fused for each in entries)
    return [
        (
            f'rounding="exact": {cost} targets are left alone because their kernels round otherwise; {kept} are fused, '
            "by kernels that were the originals bit for bit in all sizes tried"
        )
    ]


def _untraced(rules: Rules, decisions: Sequence[Decision]) -> list[str]:
    """Where ``torch.compile`` would lose the gradients of kernels, a note that it gets the originals."""
    used = {decision.entry.kernel_id for decision in decisions}
    traced = {each.kernel_id for each in rules.records if each.kernel and each.kernel.when_traced == "kernel"}
    if not rules.loses_gradients_when_traced or not used & traced:
        return []
    return [
        (
            f"calls that torch.compile traces are the originals': torch {torch.__version__} may compile a kernel's "
            "function without its gradient (https://github.com/pytorch/pytorch/issues/180642); other releases do not"
        )
    ]


def _passed_by(decisions: Sequence[Decision]) -> list[str]:
    """A note on each kernel whose module somebody computes past, as a trainer's own head does."""
    found = []
    for decision in decisions:
        arounds = [patch for patch in decision.patches if patch.target.around]
        for patch in decision.patches:
            for around in arounds if patch not in arounds else ():
                module, path = around.module_ref(), patch.path
                if module is not None and (who := computes_past(module, around.target.method, path)):
                    found.append(
                        f"{who} is the {around.target.method} of {class_name(module)}, and reads the weight of {path} "
                        f"itself: calls that it computes so go past {patch.kernel_id}, which then does nothing"
                    )
    return found


def _unasked(allow: Sequence[str], consents: AbstractSet[str]) -> list[str]:
    """A note on each consent that no kernel asked for."""
    known = f"; asked for: {', '.join(sorted(consents))}" if consents else ""
    return [f"allow={word!r}: no kernel asked for that{known}" for word in allow if word not in consents]


def _notes(model: nn.Module, decisions: Sequence[Decision], records: Sequence[KernelRecord]) -> list[str]:
    """What a user should know beyond the answers for each site."""
    found = []
    entries = [decision.entry for decision in decisions]
    used = {entry.kernel_id for entry in entries}
    if lacking := sorted(
        {f'"{record.requires}"' for record in records if record.requires and record.kernel_id in used}
    ):
        found.append(f"the machine that this is planned for needs: pip install {' '.join(lacking)}")
    if any(entry.check == "pending" for entry in entries):
        found.append("kernel check pending: call apply_all again once the model is on its device")
    if attributes_of(model).get("_use_kernels") is True:
        found.append(
            "this model has use_kernels=True: transformers sets forwards again on train() and eval(), which takes "
            "kernels off; call apply_all after, or set model.use_kernels = False"
        )
    return found
