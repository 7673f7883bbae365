"""Our experts as an experts implementation of transformers: in modules and models, and what is left to others."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from support.mixtures import assert_close
from support.programs import by_pytorch
from support.thorough import quick_if
from support.tiny import build, inputs, step
from survey import build as survey
from torch import nn
from transformers.activations import ACT2FN

import fuseplug_moe.for_transformers as door
from fuseplug_backends.inductor import Program

moe_door = pytest.importorskip("transformers.integrations.moe", reason="older than experts implementations")
EXPERTS = moe_door.ALL_EXPERTS_FUNCTIONS
KINDS = {
    "qwen3_moe": "silu",
    "gpt_oss": "callable",  # transposed, biased, with a gate of its own
    "nemotron_h": "relu2",  # no gate
    "aria_text": "silu",  # transposed
    "muse_spark_text": "silu",  # a norm of each expert's rows
    "deepseek_v4": "callable",
}
"""Model types with experts of every kind, and the activation that `moe` is given for them."""


@pytest.fixture
def name():
    """The name of our implementation, which takes calls of every size."""
    yield door.register_experts("ours", every_size=True)
    EXPERTS._global_mapping.pop("ours", None)
    EXPERTS._local_mapping.pop("ours", None)


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of every call of `moe`."""
    found, moe = [], door.moe
    monkeypatch.setattr(door, "moe", lambda *args, **options: found.append(options) or moe(*args, **options))
    return found


def experts_of(model_type, dtype=torch.float32):
    model = survey.build(model_type, dtype)
    return next(module for module in model.modules() if "is_transposed" in vars(module))


def routed(module, tokens=33, k=2, dtype=torch.float32, elsewhere=False):
    generator = torch.Generator().manual_seed(3)
    number, *sizes = module.down_proj.shape
    hidden = sizes[1 if module.is_transposed else 0]
    index = torch.rand(tokens, number, generator=generator).topk(k)[1]
    weights = torch.rand(tokens, k, generator=generator)
    if elsewhere:
        index[::3, 0], weights[::3, 0] = number, 0.0
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    return x.requires_grad_(), index, weights.to(dtype).requires_grad_()


def run(module, implementation, arguments):
    """The result of *module*, and the gradients of rows, routing weights and parameters."""
    module.config._experts_implementation = implementation
    y = module(*arguments)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    wanted = [arguments[0], arguments[2], *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y, wanted, upstream, allow_unused=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", KINDS)
def test_experts_of_every_kind_compute_what_they_did(name, calls, model_type, dtype):
    module = experts_of(model_type, dtype)
    arguments = routed(module, dtype=dtype)
    found, expected = run(module, name, arguments), run(module, "grouped_mm", arguments)
    assert_close(found, expected, 2e-5 if dtype is torch.float32 else 0.03)
    (options,) = calls
    assert (options["activation"] if isinstance(options["activation"], str) else "callable") == KINDS[model_type]


def test_float64_is_computed_too(name, calls):
    """transformers' grouped_mm refuses float64."""
    module = experts_of("qwen3_moe", torch.float64)
    arguments = routed(module, dtype=torch.float64)
    assert_close(run(module, name, arguments), run(module, "eager", arguments), 1e-12)
    assert len(calls) == 1


def test_a_call_without_tokens(name):
    module = experts_of("gpt_oss")
    assert module.config is not None
    module.config._experts_implementation = name
    assert module(*(each.detach() for each in routed(module, tokens=0))).shape == (0, module.down_proj.shape[-1])


def test_autocast(name, calls):
    module = experts_of("qwen3_moe")
    arguments = routed(module)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = run(module, name, arguments), run(module, "grouped_mm", arguments)
    assert_close(found, expected, 2e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_on_other_ranks_add_nothing(name, calls, model_type):
    module = experts_of(model_type)
    module._is_expert_parallel = True
    arguments = routed(module, elsewhere=True)
    assert_close(run(module, name, arguments), run(module, "grouped_mm", arguments), 2e-5)
    assert len(calls) == 1


@pytest.mark.parametrize(("parallel", "index"), [(False, 0), (True, 1), (True, -1), (False, -1)])
def test_an_index_of_no_expert_is_an_error(name, parallel, index):
    module = experts_of("qwen3_moe")
    module._is_expert_parallel = parallel
    arguments = routed(module)
    number = len(module.down_proj)
    arguments[1][4, 1] = number + index if index >= 0 else index
    with pytest.raises(IndexError, match=f"must be from 0 to {number - 1}.*look at the router"):
        run(module, name, arguments)


@pytest.mark.parametrize("model_type", quick_if(["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"], {"qwen3_moe"}))
def test_a_model_trains_as_it_did(name, calls, model_type):
    model = build(model_type)
    model.set_experts_implementation("eager")
    expected = step(model)
    assert not calls
    model.set_experts_implementation(name)
    found = step(model)
    assert calls
    names = [key for key in expected if key in found]
    # An expert without tokens has no gradient in the loop, and a gradient of zeros in grouped matmuls.
    assert {key for key in found if key not in expected and found[key].any()} == set()
    assert_close([found[key] for key in names], [expected[key] for key in names], 1e-4)
    model.set_experts_implementation("eager")
    assert all(torch.equal(value, expected[key]) for key, value in step(model).items())


@pytest.mark.thorough
def test_the_experts_of_every_model_compute_what_they_did(name, calls):
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    folders = {file.parent.name for file in files if "@use_experts_implementation" in file.read_text()}
    seen = set()
    for model_type, config_class in transformers.CONFIG_MAPPING.items():
        if config_class.__module__.split(".")[2] not in folders:
            continue
        try:
            model = survey.build(model_type)
        except Exception:  # whether a model can be built is no question of this test
            continue
        for module in model.modules():
            if "is_transposed" in vars(module) and type(module).__name__ not in seen:
                seen.add(type(module).__name__)
                arguments = routed(module)
                before = len(calls)
                assert_close(run(module, name, arguments), run(module, "grouped_mm", arguments), 2e-5)
                assert len(calls) == before + 1, type(module).__name__
    assert len(seen) > 40


class TestNotOurs:
    """Calls that are left to transformers' own grouped_mm, whose results are the same to the bit."""

    def test_small_calls(self, name, calls, monkeypatch):
        monkeypatch.setattr(Program, "__call__", by_pytorch)
        module, usual = experts_of("qwen3_moe"), door.register_experts(name)
        for tokens, ours in ((511, 0), (512, 1)):
            arguments = routed(module, tokens)
            found, expected = run(module, usual, arguments), run(module, "grouped_mm", arguments)
            assert len(calls) == ours
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)) == (not ours)

    def test_unless_they_are_decoded(self, name, calls):
        module, usual = experts_of("qwen3_moe"), door.register_experts(name)
        module.config._experts_implementation = usual
        with torch.no_grad():
            for tokens in range(1, 4):
                module(*routed(module, tokens))
                assert len(calls) == 1

    def test_weights_that_are_no_plain_tensors(self, name, calls):
        class Special(nn.Parameter):
            pass

        module = experts_of("qwen3_moe")
        module.down_proj = Special(module.down_proj.detach())
        arguments = routed(module)
        with pytest.warns(RuntimeWarning, match=r"Qwen3MoeExperts: a Special is among .* grouped_mm computes it"):
            found = run(module, name, arguments)
        assert not calls
        expected = run(module, "grouped_mm", arguments)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    def test_a_device_without_a_kernel(self, name, calls, monkeypatch):
        monkeypatch.setattr(door, "_kernel", lambda device_type: None)
        module = experts_of("qwen3_moe")
        with pytest.warns(RuntimeWarning, match="no kernel of fuseplug-moe runs on cpu here.*fuseplug doctor"):
            run(module, name, routed(module))
        assert not calls

    @pytest.mark.skipif(torch.__version__ < "2.8", reason="transformers' own experts cannot be compiled with torch 2.7")
    def test_what_is_compiled(self, name, calls):
        model = build("qwen3_moe").bfloat16()
        model.set_experts_implementation(name)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            found = compiled(**inputs(model), use_cache=False).logits
            assert not calls
            model.set_experts_implementation("grouped_mm")
            expected = model(**inputs(model), use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


class TestActivations:
    """Only an activation that is certain is fused; every other one is called as it is."""

    @pytest.mark.parametrize(
        ("key", "row"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_10", None)]
    )
    def test_of_transformers(self, key, row):
        assert door._named(ACT2FN[key]) == row

    def test_one_that_only_training_shows(self):
        assert door._named(nn.Sequential(nn.SiLU(), nn.Dropout()).eval()) is None

    def test_one_that_is_changed_later(self):
        gelu = nn.GELU()
        assert door._named(gelu) == "gelu"
        gelu.approximate = "tanh"
        assert door._named(gelu) == "gelu_tanh"
        gelu.forward = torch.relu
        assert door._named(gelu) is None

    def test_one_with_a_hook_is_called(self, name):
        module = experts_of("qwen3_moe")
        module.act_fn = copy.deepcopy(module.act_fn)
        seen = []
        run(module, name, routed(module))
        module.act_fn.register_forward_hook(lambda *_: seen.append(1))
        run(module, name, routed(module))
        assert len(seen) == 1


class TestRegistering:
    def test_again_changes_how(self, name):
        assert door.register_experts(name) == name

    @pytest.mark.parametrize("taken", ["eager", "grouped_mm", "batched_mm"])
    def test_a_name_that_is_taken(self, taken):
        before = EXPERTS.get(taken, None)
        with pytest.raises(ValueError, match=f"already has an experts implementation '{taken}'.*choose another name"):
            door.register_experts(taken)
        assert EXPERTS.get(taken, None) is before

    def test_an_older_transformers(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
        with pytest.raises(ImportError, match=r"transformers>=5.*manager\.apply_all"):
            door.register_experts()

    def test_nothing_is_said_of_what_is_computed(self, name):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(module := experts_of("qwen3_moe"), name, routed(module))
