"""Models whose classes a training framework has patched for NPUs: its operations stay, and the rest is fused."""

import types

import pytest
import torch
import torch_npu
import transformers
from support.thorough import thorough
from support.tiny import BASE, HEAD, step
from transformers.models.qwen3 import modeling_qwen3

from fuseplug import KernelManager, UndoError

pytestmark = pytest.mark.usefixtures("small_checks")
NORMS_AND_MLPS, ROTATIONS = 9 + 2, 2


def norm(self, hidden_states):
    return torch_npu.npu_rms_norm(hidden_states, self.weight, epsilon=self.variance_epsilon)[0]


def mlp(self, x):
    gate_and_up = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)
    return self.down_proj(torch_npu.npu_swiglu(gate_and_up, dim=-1))


def rotation(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(k, cos, sin)


def patch_classes(monkeypatch):
    """Patch the classes as verl and ms-swift do when they are imported."""
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", mlp)
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotation)


def patch_instances(model):
    """Patch the instances as LLaMA-Factory's kernels do."""
    for module in model.modules():
        if isinstance(module, modeling_qwen3.Qwen3RMSNorm):
            module.forward = types.MethodType(norm, module)
        elif isinstance(module, modeling_qwen3.Qwen3MLP):
            module.forward = types.MethodType(mlp, module)


@pytest.fixture
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "npu_fused_rmsnorm,npu_fused_swiglu,npu_fused_rope"})


@pytest.fixture
def model(host_npu):
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE | HEAD)).eval()


def test_classes_patched_before_keep_their_operations(host_npu, model, manager, monkeypatch):
    expected = step(model)
    model.to("npu")
    patch_classes(monkeypatch)
    applied = manager.apply_all(model)
    assert applied.report.fused == []
    assert {entry.op for entry in applied.report.left_alone} == {"rmsnorm", "swiglu", "rope"}
    for entry in applied.report.left_alone:
        assert "Could not run 'npu::npu_" in entry.why_not
        assert "registered at" not in entry.why_not, "the dispatcher's list of backends hides the reason"
    found = step(model)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert host_npu.calls["npu_rms_norm"] == 9


@thorough
def test_instances_patched_before_are_named(model, manager):
    patch_instances(model.to("npu"))
    applied = manager.apply_all(model)
    assert {entry.op for entry in applied.report.fused} == {"rope"}
    why = [entry.why_not for entry in applied.report.left_alone]
    assert len(why) == NORMS_AND_MLPS
    assert all("its forward was replaced on this instance by" in reason for reason in why)


def unused_after_three_steps(applied, model):
    for _ in range(3):
        step(model)
        unused = applied.check_in_use()
    return unused


@thorough
def test_classes_patched_afterwards_take_over_and_check_in_use_names_them(model, manager, monkeypatch):
    applied = manager.apply_all(model.to("npu"))
    assert len(applied.report.fused) == NORMS_AND_MLPS + ROTATIONS
    patch_classes(monkeypatch)
    unused = unused_after_three_steps(applied, model)
    assert len(unused) == NORMS_AND_MLPS + ROTATIONS
    assert all("is no longer the one that was replaced" in row.why for row in unused)


@thorough
def test_instances_patched_afterwards_take_over_and_undo_leaves_them(model, manager):
    applied = manager.apply_all(model.to("npu"))
    patch_instances(model)
    unused = unused_after_three_steps(applied, model)
    assert len(unused) == NORMS_AND_MLPS
    assert all("its replacement was taken off" in row.why for row in unused)
    with pytest.raises(UndoError, match="the rest was undone"):
        applied.undo()
