"""Triton's programs for the loss on an H100: no spills, logits moved by 16 bytes, few programs."""

import itertools
import re

import pytest
import torch
from support.thorough import covering, thorough

from fuseplug_linear_cross_entropy.backends.triton import launches, linear_cross_entropy, linear_logprob
from fuseplug_linear_cross_entropy.reference import FLOAT, STATISTICS, scaled, softcapped
from fuseplug_testing.triton import compile_only

BF16, SINGLE = torch.bfloat16, torch.float32
WORDS = (32000, 50257, 151936)
NAMES = ("measure", "differentiate", "measure_and_differentiate", "scale")


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """What Triton compiled for each launch, by name. What earlier tests compiled is dropped first."""
    found = {}

    class Recording:
        def __init__(self, name):
            self.name, self.program = name, getattr(launches.programs, name).fn
            self.program.device_caches.clear()

        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                found[self.name] = self.program[grid](*arguments, **constants)

            return launch

    monkeypatch.setattr(launches, "KEPT", 0.0)
    for name in NAMES:
        monkeypatch.setattr(launches.programs, name, Recording(name))
    return found


def train(dtype=BF16, words=151936, tokens=2, steps=(FLOAT,), smoothing=0.0, ignore_index=-100, bias=False):
    """Start the kernels of a mean; losses of each token, mixed or not; log-probabilities with entropy; statistics."""
    given = [torch.empty(tokens, 16, dtype=dtype), torch.empty(words, 16, dtype=dtype)]
    given += [torch.empty(words, dtype=dtype)] if bias else []
    leaves = [t.requires_grad_() for t in given]
    labels = torch.zeros(tokens, dtype=torch.int64)
    arguments = (*leaves[:2], labels, *leaves[2:])
    how = {"steps": steps, "ignore_index": ignore_index}
    torch.autograd.grad(linear_cross_entropy(*arguments, label_smoothing=smoothing, **how), leaves)
    apart = linear_cross_entropy(*arguments, label_smoothing=smoothing, reduction="none", **how)
    torch.autograd.grad(apart.sum(), leaves)
    to_be_mixed = linear_cross_entropy(*arguments, label_smoothing=None, reduction="none", **how)
    torch.autograd.grad(to_be_mixed.sum(), leaves)
    found = linear_logprob(*arguments, entropy=True, **how)
    torch.autograd.grad(found.logprob.sum() + found.entropy.sum(), leaves)
    found = linear_cross_entropy(*arguments, statistics=tuple(STATISTICS), **how)
    torch.autograd.grad(sum(value.sum() for value in found[:-1]), leaves)


@pytest.mark.parametrize(
    ("steps", "smoothing", "dtype"),
    covering(itertools.product([(FLOAT,), softcapped(30.0)], [0.0, 0.1], [BF16, SINGLE])),
    ids=str,
)
def test_nothing_is_spilled_and_a_processor_holds_a_program(steps, smoothing, dtype):
    with compile_only(90) as programs:
        train(dtype, steps=steps, smoothing=smoothing)
    assert {program.name for program in programs} == set(NAMES)
    assert not any(program.spills for program in programs)
    # With 1024 threads, each can have 64 registers; with half as many, which measure several statistics, 128.
    assert max(program.registers for program in programs) <= 96
    assert max(program.registers for program in programs if program.name != "measure") <= 64


@pytest.mark.parametrize("dtype", [BF16, SINGLE], ids=str)
@pytest.mark.parametrize("words", WORDS)
def test_logits_are_moved_by_16_bytes(compiled, words, dtype):
    with compile_only(90):
        train(dtype, words)
    for name, program in compiled.items():
        moves = re.findall(r"(?:(ld|st)\.global)\S*?((?:\.v\d)?\.b\d+)", program.asm["ptx"])
        assert ("ld", ".v4.b32") in moves
        assert (("st", ".v4.b32") in moves) == (name != "measure")
        # Labels, what is known of a token, and the logit of its label are single numbers.
        apart = [move for move in moves if move[1] != ".v4.b32"]
        assert {width for _, width in apart} <= {".b16", ".b32", ".b64"}
        assert not any(width == ".b16" for way, width in apart if way == "st")


@pytest.mark.parametrize("dtype", [BF16, SINGLE], ids=str)
def test_a_sum_in_float32_is_scaled_by_16_bytes(compiled, dtype):
    with compile_only(90):
        launches.scale(torch.empty(128, 64), torch.ones(()), dtype)
    ptx = compiled["scale"].asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == 4
    assert ptx.count("st.global.v4.b32") == (2 if dtype is BF16 else 4)


@thorough
def test_one_set_of_programs_serves_all_models_and_batches():
    with compile_only(90) as programs:
        train(bias=True)
        known = len(programs)
        for words in WORDS:
            for tokens in (1, 2, 16, 33):
                train(words=words, tokens=tokens, ignore_index=words - 1, steps=scaled(0.1 + 1 / tokens), bias=True)
    # One for a mean, and two that scale its gradients, in half precision and in float32. Two each for losses, for
    # losses to be mixed, for log-probabilities with their entropy, and for all statistics.
    assert known == 1 + 2 + 2 + 2 + 2 + 2
    assert [program.name for program in programs[known:]] == ["scale"]  # for the gradient of a bias of an odd length


def test_smoothing_is_another_program_only_where_logits_are_measured():
    with compile_only(90) as programs:
        train()
        known = len(programs)
        train(smoothing=0.1)
        train(smoothing=0.2)
    assert [program.name for program in programs[known:]] == ["measure_and_differentiate", "measure"]
