"""Checks that fused and unfused model compute the same, by comparing both with the model in a wider dtype."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

_TIMES, _ROUNDINGS = 2.0, 16
"""How far off the fused model may be: so many times as far as the unfused one, or so many roundings if that is more."""


class Distance(NamedTuple):
    """How far results are from the true ones, relative to the norm of the true ones.

    Attributes:
        what: Which results: ``"logits"`` or ``"gradients"``.
        fused: The distance of the fused model's results.
        unfused: The distance of the unfused model's results.
        allowed: The largest distance that the fused model's results may have.
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
    """Compare the logits for *ids* and, if *gradients*, the gradients of all parameters for the loss of *ids*.

    The true results are those of a copy of *unfused* in float32, or in float64 if *unfused* is in float32.
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
    model.eval()  # dropout would make the results differ
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
