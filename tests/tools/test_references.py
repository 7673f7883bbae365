"""Notes about models that run transformers' reference implementations name the distributions to install."""

import json
import types

import pytest
import torch
import transformers
from support.delta_rules import LAYERS, NET
from support.tiny import BASE, HEAD
from torch import nn

from fuseplug_tools import doctor, references
from fuseplug_tools.references import REFERENCE_FUNCTIONS, notes

since_5 = pytest.mark.skipif(transformers.__version__ < "5", reason="before, they were attributes of the modules")

OURS = ["fuseplug-gated-delta-rule", "fuseplug-causal-conv1d"]


@pytest.fixture
def importable(monkeypatch):
    """The names of the modules that count as importable; none at first."""
    modules = set()
    monkeypatch.setattr(references, "_importable", modules.__contains__)
    return modules


def model_of(model_type, **values):
    config = transformers.AutoConfig.for_model(model_type, **BASE | HEAD | values)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def advised(model, device):
    """For each note: the class, its functions, and the distribution to install."""
    said = [note.split() for note in notes(model, types.SimpleNamespace(device_types=[device]))]
    return [(words[0], words[6:9:2], words[-1]) for words in said]


@since_5
@pytest.mark.parametrize(
    ("device", "modules", "wanted"),
    [
        ("cpu", [], OURS),
        ("cpu", ["fuseplug_causal_conv1d"], OURS[:1]),
        ("cpu", ["fla"], OURS[1:]),
        ("cuda", ["fuseplug_causal_conv1d"], ["flash-linear-attention", "causal-conv1d"]),
        ("npu", [], OURS[:1]),
        ("xpu", [], ["flash-linear-attention"]),
        ("mps", [], []),
    ],
    ids=str,
)
def test_what_to_install_for_a_model(importable, device, modules, wanted):
    importable.update(modules)
    model = model_of("qwen3_5_text", **LAYERS, **NET)
    said = advised(model, device)
    assert [name for *_, name in said] == wanted
    for cls, names, name in said:
        (functions,) = [row for row in REFERENCE_FUNCTIONS if name in (row.distribution, row.package)]
        assert cls == "Qwen3_5GatedDeltaNet"
        assert {word.rstrip(",") for word in names} == {*functions.names[:2]}


@since_5
@pytest.mark.parametrize(
    ("model_type", "values", "wanted"),
    [
        ("llama", {}, []),
        ("mamba", {"state_size": 4}, ["fuseplug-causal-conv1d", "fuseplug-selective-scan"]),
        ("mamba2", {"num_heads": 16, "head_dim": 8}, ["fuseplug-causal-conv1d", "fuseplug-ssd"]),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, ["fuseplug-causal-conv1d"]),
    ],
)
def test_models_of_all_kinds(importable, model_type, values, wanted):
    assert [name for *_, name in advised(model_of(model_type, **values), "cpu")] == wanted


def test_functions_of_these_names_elsewhere_are_not_transformers(importable):
    space = {"__name__": "somewhere"}
    exec("def causal_conv1d_fn(x): return x\ndef forward(self, x): return causal_conv1d_fn(x)", space)
    cls = type("Convolution", (nn.Module,), {"forward": space["forward"]})
    assert not advised(cls(), "cpu")
    space["causal_conv1d_fn"].__module__ = "transformers.models.any.modeling_any"
    assert [name for *_, name in advised(cls(), "cpu")] == ["fuseplug-causal-conv1d"]


@since_5
def test_plan_says_it_last(importable, run, tmp_path):
    config = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], **BASE, **HEAD, **NET}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run("plan", str(tmp_path), "--include", "rmsnorm", "--json", "--device", "cuda")
    assert code == 0
    assert [note.split()[-1] for note in json.loads(out)["notes"][-2:]] == ["flash-linear-attention", "causal-conv1d"]


def test_doctor_says_what_this_machine_lacks_for_such_models(importable):
    importable.update(["fuseplug_causal_conv1d", "mamba_ssm"])
    machine = doctor.MachineState({}, torch=torch, devices=["cpu"])
    assert doctor.linear_attention(machine).remedy == f"for such models, pip install {OURS[0]}"
    importable.add("fuseplug_gated_delta_rule")
    assert not doctor.linear_attention(machine).remedy
