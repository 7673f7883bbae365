"""What a user should know about a plan beyond the answers for each site."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from ..discovery.records import KernelRecord
from ..patching import computes_past
from ..patching.slots import attributes_of
from .deciding import Decision
from .measurer import Measurer
from .rules import Rules


def notes_on(model: nn.Module, decisions: Sequence[Decision], rules: Rules, consents: AbstractSet[str]) -> list[str]:
    """The notes on the decisions for *model*. *consents* are the words that kernels asked for."""
    return [
        *_notes(model, decisions, rules.installed),
        *_passed_by(decisions),
        *_unmeasured(rules.measurer, decisions),
        *_cost_of_rounding(rules, decisions),
        *_untraced(rules, decisions),
        *_unasked(rules.allow, consents),
    ]


def _notes(model: nn.Module, decisions: Sequence[Decision], records: Sequence[KernelRecord]) -> list[str]:
    """Notes on what the machine lacks, when to call ``apply_all`` again, and what may take kernels off."""
    notes = []
    entries = [decision.entry for decision in decisions]
    used = {entry.kernel_id for entry in entries}
    if lacking := sorted(
        {f'"{record.requires}"' for record in records if record.requires and record.kernel_id in used}
    ):
        notes.append(f"the machine that this is planned for needs: pip install {' '.join(lacking)}")
    if not records:
        notes.append("no kernels are installed: pip install fuseplug-rmsnorm, for one; `fuseplug list` names more")
    if any(entry.check == "pending" for entry in entries):
        notes.append("kernel check pending: once the model is on its device, apply_all runs each kernel there")
    if attributes_of(model).get("_use_kernels") is True:
        notes.append(
            "this model has use_kernels=True: transformers sets forwards again on train() and eval(), which takes "
            "kernels off; call apply_all after, or set model.use_kernels = False"
        )
    return notes


def _passed_by(decisions: Sequence[Decision]) -> list[str]:
    """A note on each kernel whose module a foreign method computes past, as a trainer's own head does."""
    notes = []
    for decision in decisions:
        arounds = [patch for patch in decision.patches if patch.target.around]
        for patch in decision.patches:
            for around in arounds if patch not in arounds else ():
                module, path = around.module_ref(), patch.path
                if module is not None and (who := computes_past(module, around.target.method, path)):
                    notes.append(
                        f"{who} is the {around.target.method} of {type(module).__name__}, and reads the weight of "
                        f"{path} itself: such calls bypass {patch.kernel_id}, which then does nothing"
                    )
    return notes


def _unmeasured(measurer: Measurer | None, decisions: Sequence[Decision]) -> list[str]:
    """A note on each kernel that is used as it declares, because it could not be measured as the user wanted."""
    if measurer is None:
        return []
    patches = [patch for decision in decisions for patch in decision.patches if patch.target.around]
    around = dict.fromkeys(patch.kernel_id for patch in patches)
    return [
        *measurer.notes(),
        *(
            f"not measured: {kernel_id}, because it serves some calls of the whole model and cannot be timed "
            "alone; it is used from the size that it declares"
            for kernel_id in around
        ),
    ]


def _cost_of_rounding(rules: Rules, decisions: Sequence[Decision]) -> list[str]:
    """If kernels must equal the originals bit for bit, a note on what that left unfused."""
    if not rules.exact:
        return []
    entries = [decision.entry for decision in decisions]
    cost = sum(not e.fused and any(why.kind == "rounding" for _, why in e.rejections) for e in entries)
    kept = sum(entry.fused for entry in entries)
    return [
        (
            f'rounding="exact": targets left alone because their kernels round otherwise: {cost}; fused, by kernels '
            f"that were the originals bit for bit in all sizes tried: {kept}"
        )
    ]


def _untraced(rules: Rules, decisions: Sequence[Decision]) -> list[str]:
    """If ``torch.compile`` may lose the gradients of kernels, a note that the originals compute the calls it traces."""
    used = {decision.entry.kernel_id for decision in decisions}
    traced = {r.kernel_id for r in rules.records if r.kernel and r.kernel.when_traced == "kernel"}
    if not rules.loses_gradients_when_traced or not used & traced:
        return []
    return [
        (
            f"calls that torch.compile traces are the originals': torch {torch.__version__} may compile a kernel's "
            "function without its gradient (https://github.com/pytorch/pytorch/issues/180642); other releases do not"
        )
    ]


def _unasked(allow: Sequence[str], consents: AbstractSet[str]) -> list[str]:
    """A note on each consent that no kernel asked for."""
    others = f"; asked for: {', '.join(sorted(consents))}" if consents else ""
    return [f"allow={word!r}: no kernel asked for that{others}" for word in allow if word not in consents]
