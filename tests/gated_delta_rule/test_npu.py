"""What is special to gated delta rules on NPUs: how much is launched, and that the host waits for nothing."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.delta_rules import BF16, DOUBLE, MODELS, TOLERANCE, both, tensors
from support.thorough import first_quick
from support.tiny import build, step

from fuseplug import KernelManager
from fuseplug_gated_delta_rule.backends import npu
from fuseplug_gated_delta_rule.reference import VARIANTS

VIEWS_AND_MEMORY = {"empty", "new_empty", "empty_like", "detach", "alias", "view", "unbind"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}


def launches(host_npu, variant="head", *, gradients=True, **how):
    """What a forward launches, and a backward if *gradients* are wanted."""
    arguments = {name: t.to("npu").requires_grad_(gradients) for name, t in tensors(variant, BF16, **how).items()}
    npu.gated_delta_rule(**arguments, variant=variant, normalised=True)  # what is kept from call to call
    host_npu.calls.clear()
    y, _ = npu.gated_delta_rule(**arguments, variant=variant, normalised=True)
    if gradients:
        torch.autograd.grad(y, list(arguments.values()), torch.ones_like(y))
        host_npu.calls["aten::ones_like"] -= 1
    names = {name: name.removeprefix("aten::") for name in host_npu.calls}
    return {name: host_npu.calls[full] for full, name in names.items() if name not in VIEWS_AND_MEMORY}


@pytest.mark.parametrize(
    ("variant", "forward", "backward"), [("head", 79, 149), ("channel", 128, 277)], ids=["head", "channel"]
)
def test_a_chunk_more_is_one_launch_more_in_each_scan(host_npu, variant, forward, backward):
    """In a segment; the README has the numbers for 2048 tokens, 32 chunks."""
    for chunks in (2, 5):
        how = {"shape": (1, 64 * chunks, 2, 1), "state": False}
        assert sum(launches(host_npu, variant, gradients=False, **how).values()) == forward + chunks
        # The backward scans both ways.
        assert sum(launches(host_npu, variant, **how).values()) == forward + backward + 3 * chunks


def test_a_step_of_decoding_launches_few(host_npu):
    assert sum(launches(host_npu, gradients=False, shape=(3, 1, 2, 2)).values()) <= 25


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_waits_for_nothing(host_npu, variant):
    torch.ones((), device="npu").item()
    assert "aten::_local_scalar_dense" in host_npu.calls
    for shape in ((2, 70, 1, 2), (2, 1, 1, 2)):
        for gradients in (True, False):
            assert not WAITS & launches(host_npu, variant, gradients=gradients, shape=shape).keys()


def test_nothing_is_computed_in_float64(host_npu, monkeypatch):
    """NPUs have few operations for it: the sums of decays are exact in another way."""
    dtypes = set()
    for name in ("cumsum", "sum", "sub", "mul"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda x, *args, own=own, **kw: dtypes.add(x.dtype) or own(x, *args, **kw)
        )
    launches(host_npu, shape=(1, 70, 1, 1))
    assert torch.float32 in dtypes
    assert DOUBLE not in dtypes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("at_once", [1, 512])
def test_segments_of_any_size_give_the_same(backend, monkeypatch, variant, at_once):
    monkeypatch.setattr(npu.NpuSegment, "at_once", at_once)
    backend.assert_right(*both(npu, variant, normalised=True), tensors(variant, shape=(1, 150, 2, 2)), TOLERANCE)


@pytest.mark.skipif(transformers.__version__ < "5", reason="there the functions are attributes of the modules")
@pytest.mark.parametrize("name", first_quick(["kimi_linear", "qwen3_5_text"]))
def test_a_model_computes_what_it_did_on_the_cpu(host_npu, small_checks, name):
    values, variant = MODELS[name]
    model = build(name, torch.float32, **values).eval()
    tokens = torch.arange(24).view(2, 12) + 3
    expected, written = step(model), model.generate(tokens, max_new_tokens=3, do_sample=False)
    model.to("npu")
    with KernelManager(environ={"FUSEPLUG_KERNELS": "npu_fused_gated_delta_rule"}).apply_all(model) as applied:
        assert [(entry.variant, entry.check) for entry in applied.report.fused] == [(variant, "passed")] * 2
        for key, value in step(model).items():
            # The original's gradients of decays have lost a digit or two.
            allowed = 1e-4 * expected[key].abs().max().item()
            torch.testing.assert_close(value.cpu(), expected[key], rtol=0, atol=allowed)
        assert torch.equal(model.generate(tokens.to("npu"), max_new_tokens=3, do_sample=False).cpu(), written)
        assert [(count.fused, count.original) for count in applied.calls()] == [(2, 0), (2, 0)]


@pytest.mark.parametrize("rows", [16, 48, 64])
def test_the_inverse_is_as_exact_as_a_solver(rows):
    """Also of what has large powers: 2 everywhere below the diagonal, as the same key again and again gives."""
    segment = object.__new__(npu.NpuSegment)
    segment.chunk = rows
    k = torch.nn.functional.normalize(torch.randn(3, 2, rows, 8), dim=-1)
    for system in (torch.full((1, 2, rows, rows), 2.0), 2 * k @ k.mT):
        system = system.tril(-1)
        exact = torch.linalg.inv(system.double() + torch.eye(rows, dtype=DOUBLE))
        solved = super(npu.NpuSegment, segment)._inverse(system)
        errors = [(x - exact).abs().max() for x in (segment._inverse(system), solved)]
        assert errors[0] <= 2 * errors[1] + 8 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_float64_is_the_references(host_npu):
    arguments = {name: t.to(DOUBLE) for name, t in tensors(shape=(1, 3, 1, 1)).items()}
    found, expected = (function(**arguments) for function in both(npu))
    assert all(map(torch.equal, found, expected))
