"""Times a kernel against its original in one call, by turns, or looks up the times that were kept."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug.devices import processor
from fuseplug.disk_cache import DiskCache

from .calls import RecordedCall, leaves_of, make, original_of
from .figures import Figure, Timing
from .turns import by_turns

if TYPE_CHECKING:
    from fuseplug.patching import Patch

SECONDS = 0.5
"""About how long a kernel and its original take turns. In less time, calls of a tenth of a second get too few turns."""

_TURNS = 51


def at_most(seconds: float) -> float:
    """The longest time that it takes to time a call of *seconds*: four calls that do not count, then the turns."""
    return 4 * seconds + max(SECONDS, 2 * seconds)


class Keeping(NamedTuple):
    """Where times are kept.

    Attributes:
        kept: The cache of all times.
        key: Returns the hash of everything that the kernel's calls depend on; ``""`` if there is none.
    """

    kept: DiskCache
    key: Callable[[], str]


def figure(patch: Patch, call: RecordedCall, main: Tensor, keeping: Keeping, *, gradients: bool) -> Figure:
    """Time *call* of the target that *patch* replaces.

    Args:
        patch: The replacement.
        call: The call of its target.
        main: The main input among the arguments.
        keeping: Where the times from other processes are.
        gradients: Whether to time the backward, too.

    Raises:
        Exception: Any that the kernel or the original raises.
    """
    forward = _kept_or_timed(patch, call.with_each(Tensor.detach), keeping, backward=False)
    both = None
    if gradients and main.is_floating_point():
        # The guard goes by whether the main input requires gradients, so it must, whatever it did in the model's call.
        call = call.with_each(lambda tensor: tensor.detach().requires_grad_(tensor is main or tensor.requires_grad))
        both = _kept_or_timed(patch, call, keeping, backward=True)
    return Figure(tuple(main.shape), str(main.dtype).removeprefix("torch."), forward=forward, both=both)


def described(call: RecordedCall) -> str:
    """Everything in *call* that its time may depend on, except values: shapes, strides, dtypes, numbers and flags."""
    flat = [*call.args, *(item for pair in call.kwargs.items() for item in pair)]
    numbers = [item for item in flat if item is None or type(item) in (bool, int, float, str)]
    return repr([*map(_layout, call.tensors), *numbers])


def own_tensors_of(module: nn.Module) -> str:
    """The same as `described` for the parameters of *module*."""
    return repr([(name, *_layout(parameter)) for name, parameter in module.named_parameters()])


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    steps = tensor.stride() if tensor.layout is torch.strided else ()
    return (tensor.dtype, tuple(tensor.shape), steps, tensor.requires_grad)


def _kept_or_timed(patch: Patch, call: RecordedCall, keeping: Keeping, *, backward: bool) -> Timing:
    key = _key(patch, call, keeping) if keeping.kept else ""
    if key and (before := _timing_of(keeping.kept.get(key))) is not None:
        return before
    leaves = leaves_of(call, method=patch.target.function is None) if backward else []
    functions = {"original": original_of(patch.function), "kernel": patch.function}
    runs = {name: partial(make, function, call, leaves) for name, function in functions.items()}
    samples = by_turns(runs, _TURNS, warm_up=1, within=SECONDS)
    ratios = [theirs / ours for theirs, ours in zip(samples["original"], samples["kernel"], strict=True)]
    medians = {name: statistics.median(times) for name, times in samples.items()}
    timing = Timing(gain=statistics.median(ratios), **medians)
    if key:
        keeping.kept.put(key, timing._asdict())
    return timing


def _key(patch: Patch, call: RecordedCall, keeping: Keeping) -> str:
    """The key under which the time of *call* is kept. Which gradients are timed is part of *call*."""
    checked = keeping.key()
    if not checked:
        return ""
    parameters = own_tensors_of(call.args[0]) if patch.target.function is None else ""
    device_type = call.tensors[0].device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    parts = (checked, processor(), str(autocast), described(call), parameters)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _timing_of(answer: Any) -> Timing | None:
    """The timing in *answer*, which was kept; ``None`` if *answer* holds none."""
    try:
        timing = Timing(*(float(answer[name]) for name in Timing._fields))
    except (TypeError, KeyError, ValueError):
        return None
    return timing if all(math.isfinite(number) and number > 0 for number in timing) else None
