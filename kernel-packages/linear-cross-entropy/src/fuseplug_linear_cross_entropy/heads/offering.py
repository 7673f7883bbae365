"""Offers a kernel in the place of the function by which a trainer's head scores tokens."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug import BaseKernel, Use
from fuseplug.fallback import this_thread
from fuseplug_backends.dtypes import MODEL_DTYPES
from fuseplug_backends.tracing import transparent

from ..recognise.structure import HeadAdapter
from .call import OUTPUTS, HeadCall, Results
from .comparing import Kind, Specimen, undisturbed
from .reads import unread, watched

OP = "linear_cross_entropy"
_PLAIN = (Tensor, nn.Parameter)
_AS_FAST = ("cuda", "xpu")
"""Devices for which TRL has its own Triton programs for its head, which are as fast."""
_WORDS = 8209
"""The largest vocabulary of a specimen: a prime, larger than a kernel takes in one piece."""


def offer(
    space: Mapping[str, Any], name: str, device_type: str, kernels: Sequence[BaseKernel], *, every_size: bool = False
) -> StandIn | str | None:
    """Offer a stand-in for the function that a head looks up under *name*.

    Args:
        space: The globals in which the head looks the function up.
        name: The name of the function there.
        device_type: The type of the device that holds the head.
        kernels: The kernels that take part.
        every_size: Whether to use a kernel in calls that are too small to gain.

    Returns:
        The stand-in; the reason why there is none; or ``None`` if the function does not score tokens for a head.
    """
    function = space[name]
    if not _is_score(function):
        return None
    what = f"{function.__module__}.{function.__qualname__}"
    if device_type in _AS_FAST:
        return f"{what} has programs of its own for {device_type}, which are as fast"
    able = [kernel for kernel in kernels if kernel.op == OP and kernel.runs_on(device_type) and kernel.differentiable]
    able = [kernel for kernel in able if kernel.lacks(device_type) is None and _has_statistics(kernel)]
    if not able:
        return f"no kernel of {OP} that takes part computes statistics on {device_type}"
    if why := _unlike(function):
        return f"{what} {why}"
    best = max(able, key=lambda kernel: (bool(kernel.device_types), kernel.priority))
    return StandIn(function, best, every_size=every_size)


class StandIn:
    """A kernel in the place of a function that scores tokens.

    Attributes:
        kernel_id: The id of the kernel.
    """

    def __init__(self, function: Any, kernel: BaseKernel, *, every_size: bool) -> None:
        self.kernel_id = kernel.kernel_id
        self._function, self._kernel, self._every_size = function, kernel, every_size
        self._compute = kernel.load()
        self._watched = watched(function)
        self._faults: dict[Kind, str] = {}

    def why_not(self, arguments: Sequence[Any]) -> str | None:
        """Say why the function must compute a call with these positional *arguments*; ``None`` if the kernel may.

        The reason is ``""`` if the call is too small to gain. The first call of a `Kind` tries the kernel and the
        function on specimens of that kind.
        """
        if any(space.get(name) is not value for space, name, value in self._watched):
            return f"{self._function.__qualname__} has changed since it was read: serve the head again"
        try:
            call = HeadCall(*arguments)
        except TypeError:
            return "it is called in a way that was not tried"
        if why := _unusual(call):
            return why
        if self._is_too_small(call):
            return ""
        kind = _kind_of(call)
        if kind not in self._faults:
            self._faults[kind] = self._fault(kind)
        return self._faults[kind] or None

    def compute(self, arguments: Sequence[Any]) -> Results:
        """Compute with the kernel what the function computes."""
        return HeadCall(*arguments).scored_by(self._compute)

    def _is_too_small(self, call: HeadCall) -> bool:
        if self._every_size:
            return False
        adapter = HeadAdapter("linear", frozenset())
        use = Use(adapter, call.hidden.device.type, call.hidden.dtype, torch.is_grad_enabled())
        return len(call.hidden) * len(call.weight) < self._kernel.gains_from(use)

    def _fault(self, kind: Kind) -> str:
        """Say what is wrong with the kernel or the function in calls of *kind*; ``""`` if nothing is."""
        kernel = f"{self.kernel_id} in {_said(kind)}"
        this_thread.declined = False
        try:
            with undisturbed(kind.device_type):
                # The first is as wide as the model; the second has more logits than a kernel takes in one piece.
                for width, tokens in ((kind.width, 64), (16, 520)):
                    specimen = Specimen.of(kind._replace(width=width, words=min(kind.words, _WORDS)), tokens)
                    if why := specimen.deviation(lambda call: call.scored_by(self._compute)):
                        return f"{kernel}: {why}"
                    if this_thread.declined:
                        return f"{kernel}: it leaves such calls to its reference"
                    if why := specimen.deviation(lambda call: self._function.apply(*call)):
                        return f"{self._function.__qualname__} in {_said(kind)}: {why}"
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything; the function itself computes
            return f"{kernel}: {type(error).__name__}: {error}"
        finally:
            this_thread.declined = False
        return ""


def _is_score(value: object) -> bool:
    """Say whether *value* is an ``autograd.Function`` with the parameters of a `HeadCall`."""
    if not (isinstance(value, type) and issubclass(value, torch.autograd.Function)):
        return False
    return tuple(inspect.signature(value.forward).parameters)[1:] == HeadCall._fields


def _has_statistics(kernel: BaseKernel) -> bool:
    return "statistics" in inspect.signature(kernel.load()).parameters


def _unlike(function: Any) -> str:
    """Say how *function* differs from what a `HeadCall` says; ``""`` if it does not, in float32 on the CPU."""
    if name := unread(function):
        return f"uses {name}, which may do more than compute"
    cases = [
        Kind("cpu", torch.float32, torch.float32, bias, capped, statistics, autocast=None, width=16, words=331)
        for bias, capped, statistics in ((None, False, OUTPUTS), (torch.float32, True, OUTPUTS), (None, True, ()))
    ]
    try:
        with undisturbed("cpu"):
            for case, used in itertools.product(cases, (True, False)):
                specimen = Specimen.of(case, tokens=37, entropy_used=used)
                if why := specimen.deviation(lambda call: function.apply(*call), entropy_used=used):
                    return f"computes something else: {why}"
    except Exception as error:  # noqa: BLE001 - third-party code may raise anything
        return f"raises {type(error).__name__}: {error}"
    return ""


def _unusual(call: HeadCall) -> str:
    """Say why no kernel may compute *call*; ``""`` if one may."""
    tensors = [tensor for tensor in call[:4] if tensor is not None]
    if not all(type(tensor) in _PLAIN for tensor in tensors) or not transparent(*tensors):
        return "a tensor is of a subclass, on another device, traced or transformed"
    if any(hasattr(tensor, "ds_id") for tensor in tensors):
        return "DeepSpeed has split the weight"
    if not all(tensor.dtype in MODEL_DTYPES for tensor in tensors[:-1]) or not all(map(Tensor.numel, tensors)):
        return "a tensor is empty, or has a dtype in which no model runs"
    no_word = call.targets.is_cpu and ((call.targets < 0) | (call.targets >= len(call.weight))).any()
    if call.targets.dtype is not torch.int64 or no_word:
        return "a target is no word, or not in int64"
    cap = call.final_logit_softcapping
    numbers = (call.temperature, call.logit_scale, 1.0 if cap is None else cap)
    if not all(type(number) in (int, float) and math.isfinite(number) and number for number in numbers):
        return f"temperature, scale and cap are {numbers}; expected finite numbers that are not 0"
    return ""


def _kind_of(call: HeadCall) -> Kind:
    device_type, (words, width) = call.hidden.device.type, call.weight.shape
    return Kind(
        device_type,
        call.hidden.dtype,
        call.weight.dtype,
        None if call.bias is None else call.bias.dtype,
        call.final_logit_softcapping is not None,
        call.statistics,
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None,
        width,
        words,
    )


def _said(kind: Kind) -> str:
    dtypes = filter(None, (kind.hidden, kind.weight, kind.bias, kind.autocast))
    return " and ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
