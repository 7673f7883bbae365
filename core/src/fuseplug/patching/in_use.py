"""Finds out whether calls reach the kernels of a model, and says so once: after ten calls, or when asked each step."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from fuseplug_verify import ProcessLock

from ..contract import Target
from ..report.ranks import rank
from .counting import Calls, Counted, as_it_is, counted
from .hooked import describe
from .journal import Patch
from .slots import computes_past, is_original, wrapped_by
from .tally import ENOUGH, Count

_logger = logging.getLogger("fuseplug")
_saying = ProcessLock()

_AGAIN = "apply_all, called again, checks the kernels for that"
_REMEDIES = {
    "it has a dtype": _AGAIN,
    "the main input is not on": _AGAIN,
    "gradients are on": "call the model under torch.no_grad(), or call apply_all again without mode= to train it",
    "autocast is on": "the kernel is not used under autocast; exclude= leaves it out",
    "there are hooks": "apply_all, called again, leaves alone what cannot be fused below hooks",
    "no longer as it was": "the kernel runs again once it is; apply_all, called again, judges what is there now",
}
"""The remedy for a reason, by how the reason begins."""

_REPLACED = "is no longer the one that was replaced"


@dataclass(frozen=True)
class NotInUse:
    """A fused target whose kernel does nothing.

    Attributes:
        paths: Where the target's module is.
        target: What was replaced in that module.
        kernel_id: The kernel of the replacement.
        why: What happened instead.
        too_small: Whether this is expected, because every call was too small to gain.
    """

    paths: tuple[str, ...]
    target: Target
    kernel_id: str
    why: str
    too_small: bool = False


class InUse:
    """Watches the call counts of a model, starting now, and warns once of kernels that do nothing.

    Watching adds one comparison to each call of a kernel. It finds the reason for a few of the calls that originals
    compute.

    Args:
        patches: The replacements in the model.
        model: Returns the model; ``None`` once the model is gone.
        anew: Whether to leave out calls from before now.
    """

    def __init__(self, patches: Sequence[Patch], model: Callable[[], nn.Module | None], *, anew: bool = True) -> None:
        self._patches = [patch for patch in patches if not patch.target.around]
        self._model = model
        self._targets = [(target, as_it_is(target.counter) if anew else Count()) for target in counted(patches)]
        self._looks = 0
        self._findings: list[NotInUse] | None = None
        self._warned = False
        self.watch()

    def watch(self) -> None:
        """Watch the calls from now on, in place of any other watcher, unless the warning was given."""
        if not self._warned:
            for target, _ in self._targets:
                target.counter.watched_by(self)

    def look(self, after: int) -> list[NotInUse]:
        """Note the end of a step. After *after* steps, judge once, log the findings, and return them from then on."""
        if self._findings is None:
            self._looks += 1
            if self._looks < after:
                return []
            self._findings = [*self._lost(), *self._made_real(1, 0), *self._unused()]
            self._say(self._findings)
        return self._findings

    def enough(self, pace: Count) -> None:
        """Judge what is certain by now. *pace* has had `ENOUGH` calls by its kernel, or as many refused in a row."""
        try:
            passed_by, undecided = self._passed_by()
            findings = [*passed_by, *self._refused(), *self._made_real(ENOUGH - 1, 1)]
        except Exception:
            _logger.debug("it cannot be judged whether kernels are in use", exc_info=True)
            findings, undecided = [], False
        for target, _ in self._targets:
            if not (undecided and target.counter is pace):
                target.counter.until = 0
        if findings:
            self._say(findings)

    def _say(self, findings: Sequence[NotInUse]) -> None:
        """Log one warning of all that is wrong, and one line about targets whose calls were merely too small."""
        small = [finding for finding in findings if finding.too_small]
        count = len(self._patches)
        if small and rank() == 0:
            _logger.info("%d of %d fused targets had no call large enough to gain", len(small), count)
        wrong = [finding for finding in findings if not finding.too_small]
        with _saying:
            if not wrong or self._warned:
                return
            self._warned = True
        for target, _ in self._targets:
            target.counter.unwatched()
        if rank() == 0:
            lines = "\n".join(f"  {line}" for line in _lines(wrong))
            _logger.warning("%d of %d fused targets are not in use:\n%s", len(wrong), count, lines)

    def _calls(self) -> list[tuple[Counted, Calls]]:
        """The targets that are in place, each with the calls that count (see *anew*)."""
        in_place = [(target, before) for target, before in self._targets if target.patch.in_place()]
        return [(target, target.calls(before, target.counter.reasons)) for target, before in in_place]

    def _lost(self) -> Iterator[NotInUse]:
        for patch in self._patches:
            if not patch.in_place():
                yield _not_in_use(patch, _how_lost(patch))

    def _unused(self) -> Iterator[NotInUse]:
        """The targets in place whose kernels computed nothing."""
        calls = self._calls()
        called = {id(target.patch.function) for target, of in calls if _number(of)}
        for target, of in calls:
            # A layer may do without a function that other layers call.
            spared = target.traced or (target.patch.target.function is not None and id(target.patch.function) in called)
            if of.original and not of.fused:
                why = _by_the_original(f"all of its {of.original} calls", of.reasons)
                yield _not_in_use(target.patch, why, too_small=not of.reasons)
            elif not (_number(of) or spared):
                why = "no fused module was called: is it this model, or a copy of it, that is run?"
                if called:
                    why = f"it was not called, though others were{self._past(target.patch)}"
                yield _not_in_use(target.patch, why)

    def _refused(self) -> Iterator[NotInUse]:
        """The targets whose last calls were all refused.

        This runs during the last of these calls of one target. Other targets may have theirs still ahead, so one call
        fewer is enough.
        """
        for target, of in self._calls():
            if target.counter.refused >= ENOUGH - 1 and target.counter.fused == target.counter.before:
                yield _not_in_use(target.patch, _by_the_original(f"its last {ENOUGH} calls", of.reasons))

    def _made_real(self, least: int, pending: int) -> Iterator[NotInUse]:
        """The targets with at least *least* lazy results, of which all but *pending* were computed after all."""
        for target, of in self._calls():
            if of.fused >= least and sum(of.made_real.values()) >= max(1, of.fused - pending):
                why = f"its {of.fused} lazy results were computed after all, for {', '.join(of.made_real)}"
                yield _not_in_use(target.patch, why)

    def _passed_by(self) -> tuple[list[NotInUse], bool]:
        """The targets that were never called, though targets beside them were; and whether it is too early to say.

        One call of the model may call a target several times, so the least called of those beside it counts.
        """
        often = [_number(target.calls(before)) for target, before in self._targets]
        findings, undecided = [], False
        for (target, _), number in zip(self._targets, often, strict=True):
            above, _, name = target.patch.path.rpartition(".")
            # A model may skip an item of a list (an expert, a layer) or a function (in a layer without positions).
            spared = name.isdecimal() or target.patch.target.function is not None or target.traced
            if number or (spared and target.patch.in_place()):
                continue
            paths = (other.patch.path for other, _ in self._targets)
            beside = [calls for path, calls in zip(paths, often, strict=True) if calls and _is_below(path, above)]
            if beside and min(beside) < ENOUGH - 1:
                undecided = True
            elif beside:
                why = f"it was not called, though targets beside it were, {ENOUGH} times{self._past(target.patch)}"
                findings.append(_not_in_use(target.patch, why if target.patch.in_place() else _how_lost(target.patch)))
        return findings, undecided

    def _past(self, patch: Patch) -> str:
        """For a message: the forward above the module of *patch* that computes past it, or may; ``""`` if none does."""
        module, names = self._model(), patch.path.split(".")
        for depth, name in enumerate(names):
            if module is None:
                break
            if who := computes_past(module, "forward", patch.path):
                return f": {who} computes past it"
            if who := wrapped_by(module, "forward"):
                return f"; the forward of {'.'.join(names[:depth]) or 'the model'} is {who}, which may compute past it"
            module = module._modules.get(name)
        return ""


def _is_below(path: str, above: str) -> bool:
    return not above or path.startswith(f"{above}.")


def _number(calls: Calls) -> int:
    return calls.fused + calls.original


def _not_in_use(patch: Patch, why: str, *, too_small: bool = False) -> NotInUse:
    return NotInUse((patch.path,), patch.target, patch.kernel_id, why, too_small)


def _how_lost(patch: Patch) -> str:
    module = patch.module_ref()
    if module is None:
        return "its module is gone: another was put in its place, or it was removed; apply_all fuses what is there"
    now = "the class's own again"
    if not is_original(module, patch.target.method):
        now = f"{describe(module, patch.target.method)} now: take that off"
    return f"its replacement was taken off, and it is {now}; apply_all puts it back"


def _by_the_original(calls: str, reasons: Sequence[str]) -> str:
    why = "; ".join(reasons) or "they were too small to gain"
    remedies = [_remedy(reason) for reason in reasons]
    return ". ".join([f"the original computed {calls}: {why}", *dict.fromkeys(filter(None, remedies))])


def _remedy(reason: str) -> str:
    if _REPLACED in reason:
        return "apply_all, called again, judges what is there now"
    return next((remedy for begin, remedy in _REMEDIES.items() if reason.startswith(begin)), "")


def _lines(findings: Sequence[NotInUse]) -> list[str]:
    """The lines of a warning, one for all *findings* that differ only in the number of their layer."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        where = f"{finding.paths[0] or 'the model'}.{finding.target}"
        alike.setdefault((re.sub(r"\b\d+\b", "*", where), finding.kernel_id, finding.why), []).append(where)
    return [
        f"{paths[0] if len(paths) == 1 else f'{where} ({len(paths)} times)'}: {kernel_id}: {why}"
        for (where, kernel_id, why), paths in alike.items()
    ]
