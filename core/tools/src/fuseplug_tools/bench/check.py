"""Whether the fused model computes what the model computes: both are compared with the same model in a wider dtype."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

_TIMES, _ROUNDINGS = 2.0, 16
"""What the fused model may be off: so many times what the unfused one is, or so many roundings, if that is more."""


class Distance(NamedTuple):
    """How far results are from the true ones, as shares of the norm of these.

    Attributes:
        what: Which results.
        fused: Those of the fused model.
        unfused: Those of the unfused one.
        allowed: What the fused ones may be.
    """

    what: str
    fused: float
    unfused: float
    allowed: float

    @property
    def right(self) -> bool:
        """Whether the fused results are as near as they must be."""
        return self.fused <= self.allowed


def distances(unfused: nn.Module, fused: nn.Module, ids: Tensor, *, gradients: bool) -> list[Distance]:
    """Compare the logits for *ids*, and the gradients of all parameters for their loss if *gradients*.

    The true ones are those of *unfused* in float32, or in float64 if it is in float32, for which it is copied.
    """
    dtype = next(unfused.parameters()).dtype
    true = copy.deepcopy(unfused).to(torch.float64 if dtype is torch.float32 else torch.float32)
    if hasattr(true, "set_experts_implementation"):
        true.set_experts_implementation("eager")  # type: ignore[operator]  # torch's grouped_mm takes no float64
    truth = _results(true, ids, gradients=gradients)
    relative = [_shares(_results(model, ids, gradients=gradients), truth) for model in (fused, unfused)]
    floor = _ROUNDINGS * torch.finfo(dtype).eps
    return [
        Distance(what, fused=ours, unfused=theirs, allowed=max(_TIMES * theirs, floor))
        for what, ours, theirs in zip(("logits", "gradients"), *relative, strict=False)
    ]


def _results(model: nn.Module, ids: Tensor, *, gradients: bool) -> list[list[Tensor]]:
    model.eval()  # dropout would make them differ
    if not gradients:
        with torch.no_grad():
            return [[model(input_ids=ids, use_cache=False).logits]]
    model.zero_grad(set_to_none=True)
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [[output.logits.detach()], grads]


def _shares(results: list[list[Tensor]], truth: list[list[Tensor]]) -> list[float]:
    return [_distance(ours, theirs) / _norm(theirs) for ours, theirs in zip(results, truth, strict=True)]


def _distance(tensors: list[Tensor], truth: list[Tensor]) -> float:
    squares = ((ours.to(true.dtype) - true).norm().item() ** 2 for ours, true in zip(tensors, truth, strict=True))
    return math.sqrt(sum(squares))


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(tensor.norm().item() ** 2 for tensor in tensors))
