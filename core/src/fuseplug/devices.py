"""Device types: which ones exist, and whether one is present."""

from __future__ import annotations

import difflib
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import PlanError

KNOWN = frozenset({"cpu", "cuda", "npu", "xpu", "mps", "hpu", "mtia", "mlu", "musa", "xla"})
_ALSO_CALLED = {"gpu": "cuda", "ascend": "npu"}


@dataclass(frozen=True)
class Destination:
    """Where a model will run.

    Attributes:
        type: The type of the device.
        device: The device; ``None`` if none of its type is present, in which case torch may not even know the type.
    """

    type: str
    device: torch.device | None


def destination(device: torch.device | str, types: Iterable[str]) -> Destination:
    """The destination that *device*, as a user names it, stands for.

    Raises:
        PlanError: If *device* is a string whose type is not among *types*, or whose index is not a number.
    """
    if isinstance(device, torch.device):
        return Destination(device.type, device if present(device.type) else None)
    kind, _, index = str(device).partition(":")
    if kind not in types or (index and not index.isdigit()):
        near = [_ALSO_CALLED[kind]] if kind in _ALSO_CALLED else difflib.get_close_matches(kind, list(types), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PlanError(f"device={device!r} is unknown: expected one of {', '.join(sorted(types))}{hint}")
    if not present(kind):
        return Destination(kind, None)
    return Destination(kind, torch.device(kind, int(index)) if index else torch.device(kind))


def present(device_type: str) -> bool:
    """Whether tensors can be put on a device of this type now."""
    if device_type == "cpu":
        return True
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (AttributeError, RuntimeError):
        return False


def processor() -> str:
    """The name of the CPU, from Linux or else from Python, and which of its vector instructions torch uses."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    # One name may stand for many processors, above all on rented machines.
    return f"{next(named, platform.processor())}, {torch.backends.cpu.get_cpu_capability()}"


def device_here(device: str | None) -> str:
    """The device on which to run a model now: *device*, or by default the accelerator, or the CPU if there is none.

    Raises:
        PlanError: If *device* is unknown or not present.
    """
    if device is None:
        here = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if here is None else here.type
    place = destination(device, KNOWN)
    if place.device is None:
        raise PlanError(
            f"--device {device}: this machine has none, and the model must run on it; `fuseplug doctor` says more"
        )
    return str(place.device)
