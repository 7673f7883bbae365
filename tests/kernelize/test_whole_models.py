"""Transformers' own use_kernels puts on verified layers, with the `kernels` package: `nox -s kernelize` has it."""

import copy

import pytest
import torch
from support.parity import ROUNDINGS, distance
from support.thorough import first_quick
from support.tiny import build, step
from transformers import KernelConfig
from transformers.integrations.hub_kernels import kernelize

from fuseplug import KernelManager, PlanError
from fuseplug_tools.integrations.kernelize import VerifiedLayer, kernel_mapping

MODELS = ("qwen3", "llama", "olmo2", "qwen2_5_vl")


@pytest.fixture
def manager(monkeypatch):
    manager = KernelManager(environ={})
    monkeypatch.setattr("fuseplug_tools.integrations.kernelize.manager", manager)
    return manager


@pytest.fixture
def computed(monkeypatch):
    """The ids of the modules whose calls a kernel computed."""
    found = set()
    monkeypatch.setattr("fuseplug.patching.tally.Tally.fused", lambda tally, module: found.add(id(module)))
    return found


def use(model, mapping):
    model.kernel_config = KernelConfig(kernel_mapping=mapping, inherit_mapping=False)
    model.use_kernels = True


def go_back(model):
    model.kernel_config.kernel_mapping = {}
    kernelize(model)
    model.use_kernels = False


def norms(model):
    return {id(module) for module in model.modules() if getattr(type(module), "kernel_layer_name", "") == "RMSNorm"}


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize("model_type", first_quick(MODELS))
def test_a_model_computes_what_it_did_and_does_so_again_afterwards(manager, computed, model_type, dtype):
    model = build(model_type, dtype)
    before = step(model)
    mapping = kernel_mapping(model)
    assert "RMSNorm" in mapping, mapping.left_out
    assert all(torch.equal(value, before[key]) for key, value in step(model).items())
    assert not computed
    use(model, mapping)
    fused = step(model)
    assert computed == norms(model)
    computed.clear()
    model.train()  # transformers puts the layers on again
    model.eval()
    again = step(model)
    assert computed == norms(model)
    computed.clear()
    go_back(model)
    after = step(model)
    assert not computed
    truth = before if dtype is torch.float32 else step(model.float())
    assert fused.keys() == before.keys()
    for key, unfused in before.items():
        allowed = 2 * distance(unfused, truth[key]) + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        assert distance(fused[key], truth[key]) <= allowed, key
        assert torch.equal(again[key], fused[key]), key
        assert torch.equal(after[key], unfused), key


@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
@pytest.mark.parametrize("named", [False, True], ids=["by apply_all afterwards", "by the mapping"])
def test_gated_mlps_are_fused(manager, computed, monkeypatch, dtype, named):
    model = build("llama", dtype)
    mlps = {id(layer.mlp) for layer in model.model.layers}
    if named:
        monkeypatch.setattr(type(model.model.layers[0].mlp), "kernel_layer_name", "LlamaMLP", raising=False)
    before = step(model)
    mapping = kernel_mapping(model)
    assert set(mapping) == {"RMSNorm"} | ({"LlamaMLP"} if named else set())
    assert ("once the class has a layer name" in mapping.left_out["SiLU"]) is not named
    use(model, mapping)
    mapped = step(model)
    assert computed == norms(model) | (mlps if named else set())
    if not named:
        applied = manager.apply_all(model, include="swiglu")
        assert [entry.paths for entry in applied.report.fused] == [(f"model.layers.{n}.mlp",) for n in range(2)]
    computed.clear()
    fused = step(model)
    assert computed == norms(model) | mlps
    model.train()  # transformers puts its forwards on again
    model.eval()
    computed.clear()
    assert all(torch.equal(value, fused[key]) for key, value in step(model).items())
    assert computed == norms(model) | mlps
    truth = before if dtype is torch.float32 else step(copy.deepcopy(model).float())
    for key, unfused in before.items():
        allowed = 2 * distance(unfused, truth[key]) + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        assert distance(fused[key], truth[key]) <= allowed, key
    computed.clear()
    if not named:
        applied.undo()
        assert all(torch.equal(value, mapped[key]) for key, value in step(model).items())
        assert computed == norms(model)
        computed.clear()
    go_back(model)
    assert all(torch.equal(value, before[key]) for key, value in step(model).items())
    assert not computed


class Doubled(torch.nn.Module):
    """The layer that another mapping puts on activations."""

    can_torch_compile = has_backward = True

    def forward(self, x):
        return 2 * torch.nn.functional.silu(x)


@pytest.mark.parametrize("first", ["fused", "mapped"])
def test_an_activation_with_another_kernel_is_called(manager, computed, first):
    model, other = build("llama"), build("llama")
    other.load_state_dict(model.state_dict())
    mapping = {"SiLU": {"cpu": VerifiedLayer(Doubled)}}
    use(other, mapping)
    expected = step(other)
    if first == "fused":
        applied = manager.apply_all(model, include="swiglu")
        assert len(applied.report.fused) == 2
        use(model, mapping)
    else:
        use(model, mapping)
        report = manager.apply_all(model, include="swiglu").report
        assert not report.fused
        assert f"its forward is {__name__}.Doubled.forward" in report.left_alone[0].why_not
    computed.clear()
    assert all(torch.equal(value, expected[key]) for key, value in step(model).items())
    assert not computed


def test_what_no_kernel_replaces_is_left_out_with_the_reason(manager):
    why = kernel_mapping(build("llama")).left_out["SiLU"]
    assert "inductor_fused_swiglu computes it with model.layers.0.mlp (LlamaMLP): apply_all after use_kernels" in why
    why = kernel_mapping(build("llama"), exclude="swiglu").left_out["SiLU"]
    assert "no kernel replaces its whole forward" in why


def test_a_model_whose_norms_have_no_layer_name_is_refused(manager):
    with pytest.raises(PlanError, match=r"no layer of Gemma3ForCausalLM can be mapped: GeluTanh: .*act_fn"):
        kernel_mapping(build("gemma3_text"), verify=False)


def test_a_copy_has_its_own_modules_fused(manager, computed):
    model = build("llama")
    use(model, kernel_mapping(model))
    other = copy.deepcopy(model)
    step(other)
    assert computed == norms(other) != norms(model)


def test_another_model_stays_as_it_is(manager, computed):
    model, other = build("llama"), build("llama")
    use(model, kernel_mapping(model))
    step(other)
    assert not computed
    assert other.kernel_config is None


def test_apply_all_fuses_what_went_back(manager):
    model = build("llama")
    use(model, kernel_mapping(model))
    go_back(model)
    assert manager.apply_all(model, include="rmsnorm").report.fused
