"""Models outside transformers: modules built like a norm, a gate, a rotation or experts are fused there, too."""

import json
import shutil

import pytest
import torch
from support.elsewhere import MODELS, REMOTE
from support.parity import ROUNDINGS, assert_parity
from support.thorough import thorough
from transformers import AutoConfig, AutoModelForCausalLM

from fuseplug import KernelManager

NORM, ROTATED = ("RMSNorm", "llama"), ("Attention", "complex")
FUSED = {
    "llama": {NORM, ROTATED, ("FeedForward", "silu")},
    "llama-mixture": {NORM, ROTATED, ("MoeLayer", "silu renormalised")},
    "gpt": {("RMSNorm", "torch"), ("Rotary", "half-size-negated-wide")},
    "encoder": {("RMSNorm", "torch")},
    "recipes": {NORM, ("RotaryPositionalEmbeddings", "interleaved-half-size-wide"), ("FeedForward", "silu")},
    "vision": {
        ("SwiGLU", "silu"),
        ("GluMlp", "sigmoid gate-second"),
        ("GluMlp", "silu gate-first"),
        ("SwiGLUFFN", "silu gate-first"),
    },
    "remote": {("MyRMSNorm", "llama"), ("MyAttention", "half"), ("MyMLP", "silu")},
}
"""The classes and variants that are fused, for each model."""

LEFT_ALONE = {
    "encoder": {("EncoderLayer", "it also calls self_attn, a MultiheadAttention")},
}
"""The classes that are left alone, and the beginning of the reason, for each model."""


@pytest.fixture(scope="module")
def manager():
    return KernelManager(environ={})


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """A folder like a repository on the Hub: weights, a config that names its own classes, and their code."""
    folder = tmp_path_factory.mktemp("own-model")
    for file in REMOTE.glob("*.py"):
        shutil.copy(file, folder)
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
    return folder


@pytest.fixture
def build(remote):
    """Make a model in eval mode, always with the same weights."""

    def made(name, dtype=torch.float32):
        torch.manual_seed(0)
        if name == "remote":
            model = AutoModelForCausalLM.from_pretrained(remote, trust_remote_code=True)
        else:
            model = MODELS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                # A norm's weight of exactly one, or a bias of exactly zero, would hide its use.
                if parameter.dim() < 2:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model.eval().to(dtype)

    return made


def step(model):
    """One forward and backward: the logits, and the gradient of each parameter, by name."""
    model.zero_grad(set_to_none=True)
    found = model(torch.arange(24).view(2, 12) * 7 % 57 + 3)
    logits = found if isinstance(found, torch.Tensor) else found.logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    logits.backward(upstream / logits.numel() ** 0.5)
    return {"logits": logits.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(
            *(dtype, name),
            marks=[pytest.mark.xdist_group(f"elsewhere {dtype}"), *([] if dtype is torch.float32 else [thorough])],
        )
        for dtype in ROUNDINGS
        for name in FUSED
    ],
    ids=str,
)
def test_all_is_fused_or_said_to_be_left_alone_and_computes_what_it_did(manager, build, name, dtype):
    report = assert_parity(manager, build(name, dtype), step, verify=False)
    assert {(entry.class_name, entry.variant) for entry in report.fused} == FUSED[name], report
    left = {(e.class_name, reason.reason) for e in report.left_alone if not e.covered_by for _, reason in e.rejections}
    expected = LEFT_ALONE.get(name, set())
    assert len(left) == len(expected), report
    assert all(any(cls == c and reason.startswith(start) for c, reason in left) for cls, start in expected), report
