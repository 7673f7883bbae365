"""Recurrences on NPUs: how much they launch, that the host waits for nothing, and where they are cut."""

import pytest
import torch
import transformers
from support import delta_rules, ssd
from support.recurrences import BF16, DOUBLE, rows
from support.thorough import first_quick
from support.tiny import build, step

from fuseplug import KernelManager
from fuseplug_gated_delta_rule.backends.npu import NpuSegment as OfDeltaRule
from fuseplug_ssd.backends.npu import NpuSegment as OfChunkScan

ROWS = rows()
VIEWS_AND_MEMORY = {"empty", "new_empty", "empty_like", "detach", "alias", "view", "unbind"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}

every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@pytest.fixture
def kernel(backend, row):
    return row.both(backend.module(row.op))[0]


def launches(host_npu, row, kernel, *, gradients=True, **how):
    """What a forward without an initial state launches, and its backward if *gradients* are wanted."""
    arguments = {name: t.to("npu").requires_grad_(gradients) for name, t in row.tensors(BF16, **how).items()}
    del arguments[row.optional[-1]]
    kernel(**arguments)  # computes what is kept from call to call
    if gradients:
        torch.autograd.grad(kernel(**arguments)[0].sum(), list(arguments.values()))
    host_npu.calls.clear()
    y, _ = kernel(**arguments)
    if gradients:
        torch.autograd.grad(y, list(arguments.values()), torch.ones_like(y))
        host_npu.calls["aten::ones_like"] -= 1
    names = {name: name.removeprefix("aten::") for name in host_npu.calls}
    return {name: host_npu.calls[full] for full, name in names.items() if name not in VIEWS_AND_MEMORY}


LAUNCHES = {
    "ssd": ((4, 3), 34, 80, 0, 0),
    "gated_delta_rule-head": ((2, 1), 79, 149, 1, 3),
    "gated_delta_rule-channel": ((2, 1), 128, 277, 1, 3),
}
"""The rest of the shape; launches of a forward, and of a backward; per chunk those of a forward, and of both."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_is_launched_in_a_segment(host_npu, backend, name):
    """The READMEs state the numbers for 2048 tokens, which are 32 chunks."""
    row, (rest, forward, backward, of_forward, of_both) = ROWS[name], LAUNCHES[name]
    kernel = row.both(backend.module(row.op))[0]
    for chunks in (2, 5):
        shape = (1, 64 * chunks, *rest)
        assert (
            sum(launches(host_npu, row, kernel, gradients=False, shape=shape).values()) == forward + chunks * of_forward
        )
        assert sum(launches(host_npu, row, kernel, shape=shape).values()) == forward + backward + chunks * of_both


@every
def test_a_step_of_decoding_launches_few(host_npu, row, kernel):
    assert sum(launches(host_npu, row, kernel, gradients=False, **row.step).values()) <= 25


@every
def test_the_host_waits_for_nothing(host_npu, row, kernel):
    torch.ones((), device="npu").item()
    assert "aten::_local_scalar_dense" in host_npu.calls
    for shape in (row.long, row.step):
        for gradients in (True, False):
            assert not WAITS & launches(host_npu, row, kernel, gradients=gradients, **shape).keys()


@every
def test_nothing_is_computed_in_float64(host_npu, row, kernel, monkeypatch):
    """NPUs have few operations for float64, so the sums of decays are made exact in another way."""
    dtypes = set()
    for name in ("cumsum", "sum", "sub", "mul"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda x, *args, own=own, **kw: dtypes.add(x.dtype) or own(x, *args, **kw)
        )
    launches(host_npu, row, kernel, **row.long)
    assert torch.float32 in dtypes
    assert DOUBLE not in dtypes


@pytest.mark.parametrize("at_once", [1, 1 << 9, 1 << 15])
@every
def test_segments_of_any_size_give_the_same(backend, row, monkeypatch, at_once):
    for segment in (OfDeltaRule, OfChunkScan):
        monkeypatch.setattr(segment, "at_once", at_once)
    arguments = row.tensors(**row.shapes[-1])
    backend.assert_right(*row.both(backend.module(row.op)), arguments, row.tolerance)


def test_segments_of_some_sequences_and_several_chunks(backend, monkeypatch):
    monkeypatch.setattr(OfChunkScan, "at_once", 1 << 16)
    row = ROWS["ssd"]
    backend.assert_right(*row.both(backend.module(row.op)), row.tensors(shape=(3, 134, 4, 3)), row.tolerance)


MODELS = {
    "kimi_linear": ("gated_delta_rule", delta_rules.MODELS["kimi_linear"][0]),
    "mamba2": ("ssd", ssd.MODELS["mamba2"]),
    "qwen3_5_text": ("gated_delta_rule", delta_rules.MODELS["qwen3_5_text"][0]),
}


@pytest.mark.skipif(transformers.__version__ < "5", reason="there the functions are written out, or of the module")
@pytest.mark.parametrize("name", first_quick(MODELS, 2))
def test_a_model_computes_what_it_did_on_the_cpu(host_npu, small_checks, name):
    op, values = MODELS[name]
    model = build(name, torch.float32, **values).eval()
    tokens = torch.arange(24).view(2, 12) + 3
    expected, written = step(model), model.generate(tokens, max_new_tokens=3, do_sample=False)
    model.to("npu")
    with KernelManager(environ={"FUSEPLUG_KERNELS": f"npu_fused_{op}"}).apply_all(model) as applied:
        assert {entry.check for entry in applied.report.fused} == {"passed"}, applied.report
        for key, value in step(model).items():
            # The original's gradients of decays lose a digit or two.
            allowed = 1e-4 * expected[key].abs().max().item()
            torch.testing.assert_close(value.cpu(), expected[key], rtol=0, atol=allowed)
        assert torch.equal(model.generate(tokens.to("npu"), max_new_tokens=3, do_sample=False).cpu(), written)
        assert {(count.fused, count.original) for count in applied.calls()} == {(2, 0)}


@every
def test_float64_is_the_references(backend, row):
    arguments = {name: t.to(DOUBLE) for name, t in row.tensors(**row.tiny).items()}
    results, expected = (function(**arguments) for function in row.both(backend.module(row.op)))
    assert all(map(torch.equal, results, expected))
