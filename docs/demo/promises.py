"""Checks of what Fuseplug promises: something was fused, and undo() is exact."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from model import build, logits

from fuseplug import manager

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BrokenPromiseError(Exception):
    """Fuseplug broke one of its promises."""


def apply(model: PreTrainedModel) -> tuple[Any, float]:
    """Fuse *model*; return the handle and the seconds that this took.

    Raise if nothing was fused, because the demo would compare a model with itself.
    """
    start = time.perf_counter()
    applied = manager.apply_all(model)
    seconds = time.perf_counter() - start
    if not any("forward" in vars(module) for module in model.modules()):
        raise BrokenPromiseError(f"apply_all(model) fused nothing. Its report:\n{applied.report}")
    return applied, seconds


def check_round_trip(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[Any, float]:
    """Raise unless apply and undo leave the logits of *model* as they were, to the bit.

    Return the report and the seconds of this first apply, which include the checks and the compilation.
    """
    before = logits(model, tokens)
    applied, seconds = apply(model)
    applied.undo()
    if not torch.equal(logits(model, tokens), before):
        raise BrokenPromiseError("apply_all(model).undo() changed the logits of the untrained model")
    return applied.report, seconds


def check_undo(model: PreTrainedModel, applied: Any, tokens: torch.Tensor, seed: int) -> float:
    """Undo; raise unless *model* then computes the same bits as a never-fused model with its weights.

    Return the largest difference between these logits and those of the fused model.
    """
    untouched = build(seed)
    untouched.load_state_dict(model.state_dict())
    expected = logits(untouched, tokens)
    fused = logits(model, tokens)
    applied.undo()
    if not torch.equal(logits(model, tokens), expected):
        raise BrokenPromiseError("after undo() the trained model's logits are not those of a model never fused")
    return (fused - expected).abs().max().item()
