"""Device types: which there are, and whether one is here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

from .errors import PlanError

KNOWN = frozenset({"cpu", "cuda", "npu", "xpu", "mps", "hpu", "mtia", "mlu", "musa", "xla"})


def device_of(device: torch.device | str, known: Iterable[str]) -> str:
    """What *device*, in the words of a user, stands for: a name, since PyTorch may not know the type without a plug-in.

    Raises:
        PlanError: If its type is not among *known*.
    """
    if isinstance(device, torch.device):
        return str(device)
    kind, _, index = str(device).partition(":")
    if kind not in known or (index and not index.isdigit()):
        near = difflib.get_close_matches(kind, list(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PlanError(f"device={device!r} is unknown: expected one of {', '.join(sorted(known))}{hint}")
    return str(device)


def present(device_type: str) -> bool:
    """Whether tensors can be put on a device of this type now."""
    if device_type == "cpu":
        return True
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (AttributeError, RuntimeError):
        return False
