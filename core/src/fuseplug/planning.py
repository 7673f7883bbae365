"""Which kernel for which site: every kernel asked about every module, one winner per target, a reason for the rest."""

from __future__ import annotations

import functools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .asking import Question
from .discovery import KernelRecord, elsewhere
from .errors import DiscoveryError, PatchError
from .hookspecs import BaseKernel, resolve
from .insides import all_below, attributes_of, class_name, said_by
from .patching import (
    Accepts,
    Mark,
    Patch,
    calls,
    class_method,
    describe,
    is_original,
    lookup,
    our_parts,
    replacement,
    replacement_of,
    space_of,
)
from .report import Check, Entry, Report
from .verification import ById, Ran, Semantics, Subject, Verifier, dense, own_tensors
from .walking import Place, upwards
from .words import Answer, Compute, Mode, Proposal, Rejection, Site, Target

Ask = Callable[[Sequence[Question]], Sequence[Sequence[Answer]]]
"""Puts questions to kernels, and gives their answers."""


@dataclass(frozen=True)
class Plan:
    """What would be done to a model, decided and checked; making one changes nothing.

    Attributes:
        report: The answer for every site, and why.
        patches: What the winners would put in place.
    """

    report: Report
    patches: Sequence[Patch]

    def __str__(self) -> str:
        return str(self.report)


@dataclass(frozen=True)
class Rules:
    """How winners are decided.

    Attributes:
        records: The kernels taking part.
        order: Ids or ops in the order the caller prefers them.
        mode: What the model is for.
        check: Whether kernels are run on their device before they are chosen.
        installed: Every kernel there is, for the report.
    """

    records: Sequence[KernelRecord]
    order: Sequence[str]
    mode: Mode
    check: bool
    installed: Sequence[KernelRecord]

    def rank(self, record: KernelRecord, device_type: str) -> tuple[int, bool, int, str]:
        """Sort key: the caller's order, then kernels that name this device type, then priority, then id."""
        kernel = _kernel(record)
        named = [i for i, word in enumerate(self.order) if word in (record.kernel_id, record.name, kernel.op)]
        return (
            min(named, default=len(self.order)),
            device_type not in kernel.device_types,
            -kernel.priority,
            record.name,
        )


def make_plan(model: nn.Module, places: Sequence[Place], rules: Rules, ask: Ask) -> Plan:
    """Ask all kernels about all places and decide every target. Changes nothing."""
    start = time.perf_counter()
    planner = _Planner(rules, ask)
    planner.ask(places)
    decisions = [decision for place in places for decision in planner.decide(place)]
    report = Report(
        model_class=class_name(model),
        mode=rules.mode,
        entries=[entry for entry, _ in decisions],
        records=[record for record in rules.installed if _concerns(record, places)],
        idle=planner.idle(places),
        notes=notes(model, decisions, rules.installed),
        seconds=time.perf_counter() - start - planner.compile_seconds,
        compile_seconds=planner.compile_seconds,
    )
    return Plan(report, [patch for _, patch in decisions if patch is not None])


_Decision = tuple[Entry, "Patch | None"]


@dataclass(frozen=True)
class _Offered:
    """The answers of all kernels to one question."""

    proposals: Mapping[Target, Sequence[tuple[KernelRecord, Proposal]]]
    rejections: tuple[tuple[str, Rejection], ...]


class _Planner:
    """The state of one planning: what was verified, what covers what, which kernels were of use."""

    def __init__(self, rules: Rules, ask: Ask) -> None:
        self._rules = rules
        self._ask = ask
        self._by_id = {record.kernel_id: record for record in rules.records}
        self._verifier = Verifier()
        self._covered: dict[str, str] = {}
        self._answered: set[str] = set()
        self._unavailable: dict[tuple[str, str], str | None] = {}
        self._offered: dict[tuple[int, str], _Offered] = {}

    def decide(self, place: Place) -> list[_Decision]:
        """The answers for *place*; what deciding raises is one of them, and nothing of the place is replaced then."""
        try:
            return list(self._answers(place))
        except Exception as error:  # noqa: BLE001 - a stranger's module may raise anything, whatever is done to it
            why = Rejection(
                f"it cannot be planned: {said_by(error)}. Mend its class, or leave it out with skip=", kind="error"
            )
            return [(replace(_blank(place), rejections=(("fuseplug", why),)), None)]

    def _answers(self, place: Place) -> Iterator[_Decision]:
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
            blank = replace(_blank(place), op=_kernel(self._by_id[offered.rejections[0][0]]).op)
            if covering := self._covering(place):
                yield replace(blank, covered_by=covering), None
            else:
                yield replace(blank, rejections=offered.rejections), None

    def ask(self, places: Sequence[Place]) -> None:
        """Ask about *places*, once about all that are alike."""
        first: dict[tuple[int, str], Place] = {}
        for place in places:
            if place.fault is None and not _scripted(place.module):
                first.setdefault(_likeness(place), place)
        questions = [
            Question(
                Site(place.paths[0], place.stand_in, place.device_type, self._rules.mode),
                self._taking_part(place.device_type),
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
    ) -> Iterator[_Decision]:
        fused_methods: set[str] = set()
        # Methods before the functions they call: a method that is replaced no longer calls them.
        for target in sorted(offers, key=lambda target: (target.function is not None, str(target))):
            ranked = sorted(offers[target], key=lambda offer: self._rules.rank(offer[0], place.device_type))
            entry = replace(blank, target=target, op=_kernel(ranked[0][0]).op)
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
        subject = subject_of(place, target)
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
            patch = patch_of(place, target, _kernel(record), _compute_of(record), semantics, ran, subject)
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
    ) -> tuple[Semantics, Ran, Check] | Rejection:
        kernel = _kernel(record)
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
            return semantics, Ran(semantics.dtypes), "pending"
        if not self._rules.check:
            return semantics, Ran(semantics.dtypes), "skipped"
        ran = self._verifier.kernel_check(kernel, proposal, semantics, subject, place.device)
        return ran if isinstance(ran, Rejection) else (semantics, ran, "passed")

    @property
    def compile_seconds(self) -> float:
        return self._verifier.compile_seconds

    def _taking_part(self, device_type: str) -> list[KernelRecord]:
        return [r for r in self._rules.records if r.kernel and r.kernel.runs_on(device_type)]

    def _lacks(self, record: KernelRecord, device_type: str) -> str | None:
        key = (record.kernel_id, device_type)
        if key not in self._unavailable:
            self._unavailable[key] = _kernel(record).lacks(device_type)
        return self._unavailable[key]

    def idle(self, places: Sequence[Place]) -> dict[str, str]:
        here = sorted({place.device_type for place in places})
        idle = {}
        for record in self._rules.installed:
            kernel = record.kernel
            if kernel is None or record.state != "ready":
                continue
            if not any(kernel.runs_on(device_type) for device_type in here):
                idle[record.kernel_id] = (
                    f"runs on {', '.join(kernel.device_types)}; this model is planned for {', '.join(here)}"
                )
            elif self._rules.mode == "training" and not kernel.differentiable:
                idle[record.kernel_id] = 'has no gradient: used with mode="inference"'
            elif record not in self._rules.records:
                idle[record.kernel_id] = "left out by include= or exclude="
            elif record.kernel_id not in self._answered:
                idle[record.kernel_id] = "no module of this model is its business"
        return idle


def _likeness(place: Place) -> tuple[int, str]:
    return (place.alike, place.device_type)


def _blank(place: Place) -> Entry:
    return Entry(place.paths, class_name(place.module), place.device_type)


def _scripted(module: nn.Module) -> bool:
    return issubclass(type(module), torch.jit.ScriptModule)


def _concerns(record: KernelRecord, places: Sequence[Place]) -> bool:
    """Whether *record* is worth a word: nobody wants to hear of extras for devices that the model is not on."""
    kernel = elsewhere(record).kernel if record.state == "not installed" else None
    return kernel is None or any(kernel.runs_on(place.device_type) for place in places)


def _kernel(record: KernelRecord) -> BaseKernel:
    if record.kernel is None:
        raise DiscoveryError(f"kernel {record.name} is {record.state}: {record.reason}", record=record)
    return record.kernel


def _blaming(record: KernelRecord, rejection: Rejection) -> Rejection:
    """A kernel's error names the distribution it came with: that is who can mend it."""
    if rejection.kind != "error":
        return rejection
    return replace(rejection, reason=f"{rejection.reason} [{record.distribution} {record.version}]".replace(" ]", "]"))


def _runs_elsewhere(record: KernelRecord) -> bool:
    """Whether what *record* needs is not installed here, where its function may not even be importable."""
    return bool(record.reason)


def _compute_of(record: KernelRecord) -> Compute:
    kernel = _kernel(record)
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
    except BaseException as error:  # noqa: BLE001 - a stranger's module may raise anything, or exit
        return f"{type(error).__name__} while loading {kernel.function}: {error}"
    return ""


def subject_of(place: Place, target: Target) -> Subject | Rejection:
    """What would be replaced at *place*, ready to be run; or why it cannot be replaced."""
    module = place.module
    method = class_method(module, target.method)
    if method is None:
        return Rejection(f"{class_name(module)}.{target.method} is not a plain method, so it cannot be replaced")
    if not (is_original(module, target.method) or our_parts(module, target.method)):
        who = describe(module, target.method)
        return Rejection(
            f"its {target.method} was replaced on this instance by {who}: apply before that is put on, or take it off "
            "first",
            kind="foreign",
        )
    if target.function is None:
        return _odd_tensor(module) or Subject(method, module, place.alike)
    try:
        if not calls(method, target.function):
            return Rejection(f"{method.__qualname__} does not call {target.function}")
        return Subject(lookup(method, target.function), None, space=ById(space_of(method, target.function)))
    except PatchError as error:
        return Rejection(str(error))


def _odd_tensor(module: nn.Module) -> Rejection | None:
    """Why no kernel can read what *module* holds, if a tensor of it or below it is not dense."""
    for each in all_below(module):
        for name, tensor in own_tensors(each).items():
            if not dense(tensor):
                holder = "its" if each is module else f"the {class_name(each)} below it: its"
                return Rejection(
                    f"{holder} {name} is {_layout(tensor)}, and kernels read dense tensors: make it dense, or leave "
                    "the module as it is"
                )
    return None


def _layout(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    return f"quantised to {tensor.dtype}" if tensor.is_quantized else "wrapped by torch.func"


def patch_of(
    place: Place,
    target: Target,
    kernel: BaseKernel,
    compute: Compute,
    semantics: Semantics,
    ran: Ran,
    subject: Subject,
) -> Patch | Rejection:
    """The replacement of *target*, decided and not yet on; or what its adapter raises, or why it would do nothing."""
    mark = Mark(kernel.kernel_id, semantics.adapter.variant, target, place.device_type)
    watch = replace(
        semantics.watch,
        contiguous=ran.contiguous,
        no_autocast=semantics.watch.no_autocast or ran.no_autocast,
        no_grad=not kernel.differentiable,
    )
    calls = tuple(call.limited(semantics.main, ran.ranks) for call in semantics.calls)
    accepts = Accepts(calls, semantics.main, semantics.typed, ran.dtypes, watch, semantics.extra, subject.space)
    try:
        function = replacement(subject.original, semantics.adapter, compute, mark, accepts)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a stranger's bind may raise anything, or exit
        return Rejection(f"{type(error).__name__} while binding its adapter: {error}", kind="error")
    if why := replacement_of(function).why_never(place.module if target.function is None else None):
        return Rejection(f"{why}; without that it can be fused", kind="unlike")
    return Patch(
        place.paths[0], target, kernel.kernel_id, semantics.adapter.variant, function, weakref.ref(place.module)
    )


def notes(model: nn.Module, decisions: Sequence[_Decision], records: Sequence[KernelRecord]) -> list[str]:
    """What a person should know beyond the answers for each site."""
    found = []
    used = {entry.kernel_id for entry, _ in decisions}
    if lacking := sorted({f'"{r.reason}"' for r in records if r.state == "ready" and r.reason and r.kernel_id in used}):
        found.append(f"the machine that this is planned for needs: pip install {' '.join(lacking)}")
    if any(entry.check == "pending" for entry, _ in decisions):
        found.append("kernel check pending: call apply_all again once the model is on its device")
    if attributes_of(model).get("_use_kernels") is True:
        found.append(
            "this model has use_kernels=True: transformers sets forwards again on train() and eval(), which takes "
            "kernels off; call apply_all after, or set model.use_kernels = False"
        )
    return found
