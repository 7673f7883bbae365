"""Models whose weights are quantised before or after they are fused."""

import pytest
import torch
from support.states import differing, state_of
from support.thorough import thorough
from support.tiny import build
from torch import nn

from fuseplug import KernelManager

pytestmark = [thorough, pytest.mark.filterwarnings("ignore")]

KERNELS = ["inductor_fused_rmsnorm", "inductor_fused_swiglu", "inductor_fused_rope"]
TOKENS = torch.arange(24).view(2, 12) * 7 % 57 + 3


def torchs(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)


def torchao(name):
    def quantise(model):
        api = pytest.importorskip("torchao.quantization", reason="torchao is not installed: nox -s stacks has it")
        api.quantize_(model, getattr(api, name)())
        return model

    return quantise


def bitsandbytes(name, **options):
    def quantise(model):
        modules = pytest.importorskip("bitsandbytes.nn", reason="bitsandbytes is not installed: nox -s stacks has it")
        for layer in model.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for child, linear in [*parent.named_children()]:
                    if type(linear) is nn.Linear:
                        made = getattr(modules, name)(linear.in_features, linear.out_features, bias=False, **options)
                        made.load_state_dict(linear.state_dict())
                        setattr(parent, child, made.to("cpu"))
        return model

    return quantise


ROUNDING = {"rtol": 1e-4, "atol": 1e-5}
STEP = {"rtol": 1e-2, "atol": 1e-2}
"""Inputs are quantised, too, so a value that a kernel rounds elsewhere may become the next of 127 numbers."""

WAYS = {
    "torch, int8, dynamic": (torchs, STEP),
    "torchao, int8, weights": (torchao("Int8WeightOnlyConfig"), ROUNDING),
    "torchao, int8, dynamic": (torchao("Int8DynamicActivationInt8WeightConfig"), STEP),
    "bitsandbytes, 8 bits": (bitsandbytes("Linear8bitLt", has_fp16_weights=False), STEP),
    "bitsandbytes, 4 bits": (bitsandbytes("Linear4bit"), ROUNDING),
}


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("everything_compiled")
def test_it_is_right_by_kernels_and_undone(way, order):
    quantise, tolerance = WAYS[way]
    want = logits(quantise(build("qwen3").eval()))
    model, manager = build("qwen3").eval(), KernelManager()
    if order == "after":
        model = quantise(model)
        logits(model)  # bitsandbytes notes the dtype of the first input
        plain = state_of(model)
    applied = manager.apply_all(model, include=KERNELS, verify=False)
    if order == "before":
        model = quantise(model)
    assert not torch.equal(want, logits(build("qwen3").eval()))
    torch.testing.assert_close(logits(model), want, **tolerance)
    assert {entry.op for entry in applied.report.fused} == {"rmsnorm", "swiglu", "rope"}, applied.report
    assert not applied.report.left_alone, applied.report
    assert all(calls.fused and not calls.original for calls in applied.calls()), applied.calls()
    assert applied.lost == []
    applied.undo()
    assert order == "before" or not differing(plain, state_of(model))
    assert torch.equal(logits(model), want)
