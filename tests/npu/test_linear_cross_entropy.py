"""The loss on an NPU in host memory: right in every form, for any number of chunks and pieces, and in few launches."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from support.judging import assert_right, outcome
from support.thorough import covering

from fuseplug.verification import Tolerance
from fuseplug_linear_cross_entropy import reference
from fuseplug_linear_cross_entropy.backends import npu
from fuseplug_linear_cross_entropy.reference import FLOAT, Step, scaled, softcapped

HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (BF16, HALF, SINGLE)
HIDDEN, WORDS, TOKENS = 24, 50, 7

TOLERANCE = Tolerance(roundings=5.0, working_roundings=64.0, by_row=False)
"""Roundings to a half type: of the gradient of a logit, of its products for each of two chunks, of their sum, and of
that times the gradient of the loss. In float32: dot products of 24 terms, sums over 50 words and 7 tokens, and logits
of up to 8, whose error is the relative error of a probability. A gradient is a sum over words or tokens, whose terms
all but cancel in some rows.
"""

STEPS = {
    "none": (FLOAT,),
    "scaled": scaled(0.25),
    "softcapped": softcapped(3.0),
    "in the dtype of hidden": (),
    "a temperature after a cap": (*softcapped(5.0), Step("div", 0.7)),
}
REDUCTIONS = ("mean", "sum", "none")
CUTS = {"one chunk": (7, 7), "pieces": (7, 3), "chunks": (3, 3), "chunks of pieces": (4, 3), "a token each": (1, 1)}
"""Tokens of a chunk, and of a piece of one."""


def tensors(dtype=SINGLE, bias=False, tokens=TOKENS, words=WORDS):
    """Hidden states of which some predict with certainty, one is zero."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor((1.0, 4.0, 0.1, 0.0, 2.0)).repeat(-(-tokens // 5))[:tokens, None]
    found = {
        "hidden": magnitudes * torch.randn(tokens, HIDDEN, generator=generator),
        "weight": torch.randn(words, HIDDEN, generator=generator) / math.sqrt(HIDDEN),
    }
    found |= {"bias": torch.randn(words, generator=generator)} if bias else {}
    return {name: t.to(dtype) for name, t in found.items()}


def labels_for(tokens=TOKENS, words=WORDS):
    """The first and the last word among them, and where there is room, some that are ignored."""
    labels = torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[0] = words - 1
    labels[2::4] = -100
    labels[4::5] = 0
    return labels


def both(labels=None, name="linear_cross_entropy", **options):
    labels = labels_for() if labels is None else labels

    def called(function):
        def run(hidden, weight, bias=None):
            found = function(hidden, weight, labels.to(hidden.device), bias, **options)
            return found if isinstance(found, torch.Tensor) else tuple(each for each in found if each is not None)

        return run

    return called(getattr(npu, name)), called(getattr(reference, name))


def losses(labels=None, **options):
    return both(labels, **options)


def logprobs(labels=None, **options):
    return both(labels, "linear_logprob", **options)


@pytest.fixture
def cut(monkeypatch):
    def into(chunk, piece, itemsize=4, words=WORDS):
        monkeypatch.setattr(npu, "BUDGET", chunk * words * itemsize)
        monkeypatch.setattr(npu, "WORKING", piece * words * 4)

    return into


@pytest.mark.parametrize(
    ("steps", "reduction", "smoothing", "bias", "dtype", "cuts"),
    covering(itertools.product(STEPS, REDUCTIONS, (0.0, 0.2, 1.0), (False, True), DTYPES, CUTS)),
    ids=str,
)
def test_losses(host_npu, cut, steps, reduction, smoothing, bias, dtype, cuts):
    cut(*CUTS[cuts], dtype.itemsize)
    how = {"steps": STEPS[steps], "reduction": reduction, "label_smoothing": smoothing}
    assert_right(*losses(**how), tensors(dtype, bias), TOLERANCE)
    logits = "aten::addmm" if bias else "aten::mm"
    assert host_npu.calls[logits]
    known = reduction != "none" and dtype is not HALF
    assert host_npu.calls["aten::_log_softmax"] == -(-TOKENS // CUTS[cuts][1]) * (1 if known else 2) + (
        cuts == "chunks of pieces"
    ) * (0 if known else 0)


@pytest.mark.parametrize(
    ("steps", "entropy", "bias", "dtype", "cuts"),
    covering(itertools.product(STEPS, (False, True), (False, True), DTYPES, CUTS)),
    ids=str,
)
def test_log_probabilities(host_npu, cut, steps, entropy, bias, dtype, cuts):
    cut(*CUTS[cuts], dtype.itemsize)
    assert_right(*logprobs(steps=STEPS[steps], entropy=entropy), tensors(dtype, bias), TOLERANCE)
    assert host_npu.calls["aten::_log_softmax"]
