"""Times each kernel by itself, in the calls that a model makes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fuseplug.patching.replacement import replacement_of

from ..measuring.calls import RecordedCall, leaves_of, make, original_of, recorded
from ..measuring.turns import by_turns, spread

if TYPE_CHECKING:
    from torch import nn

    from fuseplug.applications import Applied
    from fuseplug.patching import Patch

ORIGINAL, KERNEL = "original", "kernel"


@dataclass(frozen=True)
class OpRow:
    """The time of one kernel in one call of the model.

    Attributes:
        kernel_id: The kernel.
        variant: The variant that it computes.
        where: The first module with this replacement, and how many others have it.
        work: ``"forward"``, or ``"forward and backward"``.
        sizes: The shapes of the tensors in the call.
        original: Milliseconds of the model's own code, as `spread` gives them.
        kernel: Milliseconds of the kernel; ``None`` if it cannot compute such calls, whatever their size.
        gain: How many times as fast the kernel is: the median of the ratios of all turns; ``None`` if `kernel` is.
        declined: Why the original computes such calls in the fused model, even if only for their size; ``""`` if the
            kernel computes them.
    """

    kernel_id: str
    variant: str
    where: str
    work: str
    sizes: str
    original: dict[str, float]
    kernel: dict[str, float] | None
    gain: float | None
    declined: str = ""


def measure_ops(
    model: nn.Module, applied: Applied, every_size: Applied, run: Callable[[nn.Module], Any], repeats: int
) -> list[OpRow]:
    """Time every kernel of *applied* against the code that it replaces, on its own, in calls of every size.

    Args:
        model: The unfused model.
        applied: What was applied to a copy of the model.
        every_size: What was applied to another copy with ``every_size=True``: these replacements are timed, because
            those of *applied* leave small calls to the original.
        run: Runs a model. The calls that the model makes of its modules are timed, with the backward if *run* records
            gradients.
        repeats: How many turns count.

    Returns:
        A row for each different replacement. Kernels with a scope, such as that for the loss, have none, because they
        cannot be timed alone.
    """
    alike: dict[Callable[..., Any], list[Patch]] = {}
    for patch in applied.patches:
        if not patch.target.around:
            alike.setdefault(patch.function, []).append(patch)
    around = {patch.kernel_id for patch in applied.patches if patch.target.around}
    first = {function: patches for function, patches in alike.items() if patches[0].kernel_id not in around}
    calls = recorded(model, {function: patches[:1] for function, patches in first.items()}, run)
    timed = {(patch.path, patch.target, patch.kernel_id): patch.function for patch in every_size.patches}
    return [
        _row(patches, timed[patches[0].path, patches[0].target, patches[0].kernel_id], calls[function], repeats)
        for function, patches in first.items()
        if function in calls
    ]


def _row(patches: Sequence[Patch], timed: Callable[..., Any], call: RecordedCall, repeats: int) -> OpRow:
    patch = patches[0]
    tensors = call.tensors
    backward = any(tensor.requires_grad for tensor in tensors)
    leaves = leaves_of(call, method=patch.target.function is None) if backward else []
    functions = {ORIGINAL: original_of(patch.function)}
    with torch.set_grad_enabled(backward):
        never, declined = (
            replacement_of(function).why_not(call.args, call.kwargs) for function in (timed, patch.function)
        )
    if not never:
        functions[KERNEL] = timed
    runs = {name: partial(make, function, call, leaves) for name, function in functions.items()}
    samples = by_turns(runs, repeats)
    times = {name: spread([microseconds / 1e3 for microseconds in sample]) for name, sample in samples.items()}
    ratios = [theirs / ours for theirs, ours in zip(samples[ORIGINAL], samples.get(KERNEL, ()), strict=False)]
    more = f" and {len(patches) - 1} more" if len(patches) > 1 else ""
    return OpRow(
        kernel_id=patch.kernel_id,
        variant=patch.variant,
        where=f"{patch.path or 'the model'}{more}",
        work="forward and backward" if backward else "forward",
        sizes=", ".join(" × ".join(map(str, tensor.shape)) for tensor in tensors),
        original=times[ORIGINAL],
        kernel=times.get(KERNEL),
        gain=statistics.median(ratios) if ratios else None,
        declined=declined,
    )
