"""The models that are compared: the same weights, run in different ways."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from fuseplug.errors import PlanError

from ..measuring.calls import sharing

if TYPE_CHECKING:
    from torch import nn

    from fuseplug.applications import Applied
    from fuseplug.contract import Mode
    from fuseplug.kernel_manager import KernelManager

EAGER, FUSED, AGAIN, COMPILED, LIGER = "eager", "fuseplug", "eager again", "torch.compile", "Liger"


@dataclass
class Contender:
    """One way to run the model.

    Attributes:
        name: What tables call it.
        model: The model, which shares its weights with the others.
        seconds: The seconds that were paid once, before the first call.
    """

    name: str
    model: nn.Module
    seconds: float = 0.0


def eager_of(model: nn.Module, name: str = EAGER) -> Contender:
    """*model* as it is."""
    return Contender(name, model)


def fused_of(
    model: nn.Module, manager: KernelManager, mode: Mode, allow: Sequence[str], include: Sequence[str] | None
) -> tuple[Contender, Applied]:
    """*model* with the kernels of *manager*, and the handle on what was applied."""
    other, start = sharing(model), time.perf_counter()
    applied = manager.apply_all(other, mode=mode, allow=allow, include=include)
    return Contender(FUSED, other, time.perf_counter() - start), applied


def compiled_of(model: nn.Module) -> Contender:
    """*model* with ``torch.compile``, which compiles at the first call."""
    return Contender(COMPILED, cast("nn.Module", torch.compile(sharing(model))))


def liger_of(model: nn.Module) -> Contender:
    """*model* with Liger's kernels, on this instance alone.

    Raises:
        PlanError: If Liger is not installed, or has no kernels for this model or device.
    """
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise PlanError("--vs liger needs Liger: pip install liger-kernel") from error
    device = next(model.parameters()).device.type
    if device == "cpu":
        raise PlanError(
            "--vs liger: its kernels run on GPUs, and the model is on cpu; leave it out, or name a --device"
        )
    model_type = cast("Any", model.config).model_type
    if model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise PlanError(f"--vs liger: Liger has no kernels for {model_type}; leave it out")
    other, start = sharing(model), time.perf_counter()
    monkey_patch._apply_liger_kernel_to_instance(model=other)
    return Contender(LIGER, other, time.perf_counter() - start)


OTHERS: dict[str, Callable[[Any], Contender]] = {
    "again": lambda model: eager_of(model, AGAIN),
    "compile": compiled_of,
    "liger": liger_of,
}
"""The other contenders, by their names in ``--vs``."""
