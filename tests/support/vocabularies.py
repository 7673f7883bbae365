"""Hidden states, heads and labels for the backends of the loss, and how near to the truth their results must be."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fuseplug_linear_cross_entropy import reference
from fuseplug_linear_cross_entropy.reference import FLOAT, Step, scaled, softcapped
from fuseplug_verify import Tolerance

HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (BF16, HALF, SINGLE)
HIDDEN, WORDS, TOKENS = 24, 50, 7

STEPS = {
    "none": (FLOAT,),
    "scaled": scaled(0.25),
    "softcapped": softcapped(3.0),
    "in the dtype of hidden": (),
    "a temperature after a cap": (*softcapped(5.0), Step("div", 0.7)),
}
REDUCTIONS = ("mean", "sum", "none")
SMOOTHED = [(reduction, smoothing) for reduction in REDUCTIONS for smoothing in (0.0, 0.2, 1.0)] + [("none", None)]
"""Every reduction with every kind of label smoothing that goes with it."""


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How near to the truth losses of hidden states in *dtype* must be.

    Roundings to a half type: of a logit, also for a loss in float32; of its gradient; of the products for each of two
    chunks; of their sum; and of that times the gradient of the loss. In float32: dot products of 24 terms, sums over 50
    words and 7 tokens, and logits of up to 8, whose error is the relative error of a probability. A gradient is a sum
    over words or tokens, whose terms all but cancel in some rows.
    """
    return Tolerance(roundings=6.0, working_roundings=64.0, by_row=False, coarsest=dtype)


def tensors(
    dtype: torch.dtype = SINGLE, bias: bool = False, tokens: int = TOKENS, words: int = WORDS
) -> dict[str, Tensor]:
    """Hidden states, some of which predict with certainty and some of which are zero; a weight; and perhaps a bias."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor((1.0, 4.0, 0.1, 0.0, 2.0)).repeat(-(-tokens // 5))[:tokens, None]
    found = {
        "hidden": magnitudes * torch.randn(tokens, HIDDEN, generator=generator),
        "weight": torch.randn(words, HIDDEN, generator=generator) / math.sqrt(HIDDEN),
    }
    found |= {"bias": torch.randn(words, generator=generator)} if bias else {}
    return {name: t.to(dtype) for name, t in found.items()}


def labels_for(tokens: int = TOKENS, words: int = WORDS) -> Tensor:
    """Labels with the first and the last word among them and, where there is room, some that are ignored."""
    labels = torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[0] = words - 1
    labels[2::4] = -100
    labels[4::5] = 0
    return labels


def both(backend: Any, name: str, labels: Tensor | None = None, **options: Any) -> tuple[Any, Any]:
    """The function *name* of *backend* and that of the reference, both called with hidden states, weight and bias."""
    labels = labels_for() if labels is None else labels

    def called(function: Any) -> Any:
        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            found = function(hidden, weight, labels.to(hidden.device), bias, **options)
            return found if isinstance(found, Tensor) else tuple(each for each in found if each is not None)

        return run

    return called(getattr(backend, name)), called(getattr(reference, name))
