"""What happens to a fused model that is moved, hooked, compiled, wrapped or kernelized by others, and then undone."""

import copy
import itertools
import sys
import types

import pytest
import torch
from support.kernels import NormKernel, RotaryKernel, ran, variant_of
from support.models import Norm, Toy, inputs, tiny_llama, tokens
from support.states import differing, equal, state_of
from support.thorough import covering, quick_if
from torch import nn
from torch._dynamo.variables.builder import VariableBuilder

from fuseplug import UndoError

pytestmark = pytest.mark.usefixtures("checked_once")

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")


# --- moved and cast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_cast_afterwards_runs_the_original_until_it_is_planned_anew(fusing, dtype):
    model, other = Norm(), Norm().to(dtype)
    fusing.apply_all(model)
    model.to(dtype)
    ran.clear()
    assert equal(model(inputs(dtype=dtype)), other(inputs(dtype=dtype)))
    assert not ran
    fusing.apply_all(model)
    ran.clear()
    torch.testing.assert_close(model(inputs(dtype=dtype)), other(inputs(dtype=dtype)))
    assert ran["norm"] == 1


def test_a_model_moved_to_another_device_type_runs_the_original_and_comes_back(fusing):
    model = Norm()
    applied = fusing.apply_all(model)
    ran.clear()
    assert model.to("meta")(inputs().to("meta")).is_meta
    assert not ran
    model.to_empty(device="cpu")
    model(inputs())
    assert ran["norm"] == 1
    assert applied.lost == []


# --- accelerate's hooks


def hook(module):
    return hooks.add_hook_to_module(module, hooks.ModelHook(), append=True)


def unhook(module):
    return hooks.remove_hook_from_module(module)


HOOKED = [
    "apply hook run undo run unhook",
    "apply hook run unhook run undo",
    "hook apply run undo run unhook",
    "hook apply run unhook run undo",
    "apply hook hook run undo run unhook",
    "hook apply hook run unhook run undo",
    "hook apply apply run undo apply run unhook undo",
    "apply hook unhook hook run undo unhook",
]


@pytest.mark.parametrize(("order", "target"), covering(itertools.product(HOOKED, ["norm", "layers.0.attention"])))
def test_hooks_added_and_removed_in_any_order(fusing, model, order, target):
    part = model.get_submodule(target)
    before, want = state_of(model), model(inputs())
    kind = "norm" if target == "norm" else "rotary"
    fused = hooked = False
    for step in order.split():
        if step == "apply":
            assert fusing.apply_all(model).lost == []
            fused = True
        elif step == "undo":
            fusing.undo(model)
            fused = False
        elif step == "hook":
            hook(part)
            hooked = True
        elif step == "unhook":
            unhook(part)
            hooked = False
        else:
            ran.clear()
            torch.testing.assert_close(model(inputs()), want)
            assert ran[kind] == ({"norm": 5, "rotary": 2}[kind] if fused else 0)
            assert bool(hooked) == ("_hf_hook" in vars(part))
    # accelerate leaves the class's own forward bound on the instance, with or without us.
    left = vars(part).pop("forward", None)
    assert left is None or left.__func__ is type(part).forward
    assert not differing(before, state_of(model))
    assert torch.equal(model(inputs()), want)


def test_an_offloaded_model_is_fused_for_where_it_runs(fusing):
    model = Toy().eval()
    want = model(inputs())
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.norm.weight.is_meta
    report = fusing.apply_all(model).report
    assert len(report.fused) == 7
    assert {entry.device_type for entry in report.fused} == {"cpu"}
    ran.clear()
    torch.testing.assert_close(model(inputs()), want)
    assert ran["norm"] == 5
    fusing.undo(model)
    hooks.remove_hook_from_submodules(model)
    torch.testing.assert_close(model(inputs()), want, rtol=0, atol=0)


def test_a_fused_model_may_be_offloaded(fusing):
    model = Toy().eval()
    want = model(inputs())
    applied = fusing.apply_all(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    ran.clear()
    torch.testing.assert_close(model(inputs()), want)
    assert ran["norm"] == 5
    assert applied.lost == []
    applied.undo()
    assert torch.equal(model(inputs()), want)


# --- transformers' use_kernels


def kernelize(model):
    """Do what `kernels.kernelize` does if no kernel of the hub fits."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.forward = types.MethodType(type(module).forward, module)


def test_kernelize_takes_ours_off_which_is_said_and_mended(fusing, model):
    applied = fusing.apply_all(model)
    kernelize(model)
    assert {patch.path for patch in applied.lost} == {e.paths[0] for e in applied.report.fused if e.op == "toynorm"}
    again = fusing.apply_all(model)
    assert (again.lost, applied.lost) == ([], [])
    ran.clear()
    model(inputs())
    assert ran["norm"] == 5


def test_undo_after_kernelize_does_not_raise(fusing, model):
    want = model(inputs())
    applied = fusing.apply_all(model)
    kernelize(model)
    applied.undo()
    assert torch.equal(model(inputs()), want)
    assert fusing.applied_to(model) is None


def zeroing(self, hidden_states):
    return hidden_states * 0


def test_undo_names_what_a_foreign_kernel_was_put_over_and_takes_the_rest_off(fusing, model):
    before = state_of(model)
    applied = fusing.apply_all(model)
    model.norm.forward = types.MethodType(zeroing, model.norm)
    with pytest.raises(UndoError, match=r"norm\.forward is now .*zeroing.*call undo\(\) again") as caught:
        applied.undo()
    assert len(caught.value.left) == 1
    assert model.norm.forward.__func__ is zeroing
    del model.norm.forward
    assert not differing(before, state_of(model))


def test_undo_again_after_the_foreign_one_is_gone_takes_the_last_off(fusing, model):
    before = state_of(model)
    applied = fusing.apply_all(model)
    ours = model.norm.forward
    model.norm.forward = types.MethodType(zeroing, model.norm)
    for _ in range(2):
        with pytest.raises(UndoError, match=r"norm.forward is now"):
            applied.undo()
    model.norm.forward = ours
    applied.undo()
    assert not differing(before, state_of(model))


def test_leaving_with_names_it_too(fusing, model):
    with pytest.raises(UndoError, match=r"norm.forward is now"), fusing.apply_all(model):
        model.norm.forward = types.MethodType(zeroing, model.norm)
    assert not any("forward" in vars(m) for path, m in model.named_modules() if path != "norm")


# --- transformers models


@pytest.fixture
def llama():
    return tiny_llama().eval()


GENERATE = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def test_a_llama_is_fused_and_right(fusing, llama):
    want, generated = llama(tokens()).logits, llama.generate(tokens(), **GENERATE)
    report = fusing.apply_all(llama, strict=True).report
    assert len(report.fused) == 7
    ran.clear()
    torch.testing.assert_close(llama(tokens()).logits, want)
    assert ran == {"norm": 5, "rotary": 2}
    ran.clear()
    assert torch.equal(llama.generate(tokens(), **GENERATE), generated)
    assert ran["norm"] >= 25
    fusing.undo(llama)
    assert torch.equal(llama(tokens()).logits, want)


def gradients(model):
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("first", ["apply", "checkpoint"])
def test_gradient_checkpointing_gives_the_same_gradients(fusing, reentrant, first):
    model = tiny_llama().train()
    want = gradients(model)
    if first == "apply":
        fusing.apply_all(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if first != "apply":
        fusing.apply_all(model)
    model.enable_input_require_grads()
    ran.clear()
    torch.testing.assert_close(gradients(model), want)
    assert ran["norm"] > 5


# --- torch.compile


@pytest.fixture
def quiet(manager):
    """A manager of kernels without counters; their bits tell them from the originals and from each other."""
    manager.register(variant_of(NormKernel, "one", function="support.kernels:quiet_norm", priority=1))
    manager.register(variant_of(NormKernel, "two", function="support.kernels:quiet_other_norm"))
    manager.register(variant_of(RotaryKernel, "turn", function="support.kernels:quiet_rotary"))
    return manager


class Compiled:
    """A backend that runs graphs eagerly and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Chain(nn.Module):
    """Norms, one after the other."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList([Norm() for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x


def compiled(model, backend):
    return torch.compile(model, backend=backend, dynamic=False)


@pytest.mark.parametrize(("backend", "train"), covering(itertools.product(["eager", "aot_eager"], [False, True])))
def test_a_fused_model_compiles_and_is_right_forward_and_backward(quiet, model, backend, train):
    model.train(train)
    quiet.apply_all(model)
    x = inputs().requires_grad_()
    model(x).square().sum().backward()
    want, x.grad = x.grad, None
    found = compiled(model, backend)(x)
    torch.testing.assert_close(found, model(x))
    found.square().sum().backward()
    torch.testing.assert_close(x.grad, want)


STATES = {
    "none": {},
    "all": {"include": ["one", "turn"]},
    "half": {"include": ["one", "turn"], "only": "layers.0"},
    "other": {"include": ["two", "turn"]},
    "norms": {"include": "one"},
}


def bits(model, state, quiet):
    """The output of *model* in *state*, without compilation."""
    fresh = copy.deepcopy(model)
    quiet.undo(fresh)
    if state != "none":
        quiet.apply_all(fresh, **STATES[state])
    return fresh(inputs())


ORDERS = [
    ("none", "all", "none", "all"),
    ("all", "none", "all"),
    ("half", "all", "none", "half"),
    ("all", "other", "all", "none"),
    ("norms", "none", "norms", "all"),
]


@pytest.mark.parametrize(
    ("states", "whole"),
    quick_if(itertools.product(ORDERS, [True, False]), [(ORDERS[2], True), (ORDERS[1], False)]),
    ids=str,
)
def test_a_compiled_model_follows_what_is_applied_and_undone(quiet, model, states, whole):
    if whole:
        call = compiled(model, "eager")
    else:
        model.compile(backend="eager", dynamic=False)
        call = model
    for state in states:
        quiet.undo(model)
        if state != "none":
            quiet.apply_all(model, **STATES[state])
        plain = copy.deepcopy(model)
        vars(plain)["_compiled_call_impl"] = None
        want = plain(inputs())
        assert torch.equal(call(inputs()), want)


def test_the_states_differ_in_their_bits(quiet, model):
    found = [bits(model, state, quiet) for state in STATES]
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_two_kernels_alternating_in_one_graph(quiet):
    model = Chain(6)
    for i in range(6):
        quiet.apply_all(model, only=f"layers.{i}", include=["one", "two"][i % 2])
    assert torch.equal(compiled(model, "eager")(inputs()), model(inputs()))


def test_a_call_by_keyword_compiles(quiet):
    norm = Norm()
    quiet.apply_all(norm)
    call = torch.compile(lambda x: norm(hidden_states=x), backend="eager", fullgraph=True)
    assert torch.equal(call(inputs()), norm(inputs()))


def test_layers_compiled_one_by_one_are_compiled_once(quiet):
    def compilations(count):
        torch._dynamo.reset()
        model, backend = Chain(count), Compiled()
        quiet.apply_all(model)
        for layer in model.layers:
            layer.compile(backend=backend, dynamic=False)
        model(inputs())
        return backend.graphs

    assert compilations(2) == compilations(6)


def test_attentions_compiled_one_by_one_are_compiled_no_oftener_than_plain_ones(quiet):
    def compilations(fuse):
        torch._dynamo.reset()
        model, backend = Toy(layers=5).eval(), Compiled()
        if fuse:
            quiet.apply_all(model)
        for layer in model.layers:
            layer.attention.compile(backend=backend, dynamic=False)
        model(inputs())
        return backend.graphs

    assert compilations(fuse=True) <= compilations(fuse=False)


@pytest.mark.skipif(torch.__version__ < "2.8", reason="Dynamo of torch 2.7 looks into every cell of a closure")
def test_of_the_names_beside_a_function_the_compiler_is_shown_those_that_are_compared(quiet, model, monkeypatch):
    shown = []
    wrapped = VariableBuilder._wrap

    def noting(builder, value):
        if value is vars(sys.modules[Toy.__module__]):
            shown.append(builder.source)
        return wrapped(builder, value)

    monkeypatch.setattr(VariableBuilder, "_wrap", noting)
    quiet.apply_all(model)
    compiled(model, "eager")(inputs())
    assert not shown


def test_undone_and_applied_again_with_its_plan_kept_it_is_not_compiled_again(quiet, model):
    backend = Compiled()
    call = compiled(model, backend)
    kept = quiet.apply_all(model)
    call(inputs())
    want = backend.graphs
    kept.undo()
    quiet.apply_all(model)
    call(inputs())
    assert backend.graphs == want


def test_a_compiled_model_can_be_fused_through_its_wrapper(quiet, model):
    wrapper = compiled(model, "eager")
    want = wrapper(inputs())
    applied = quiet.apply_all(wrapper)
    assert len(applied.report.fused) == 7
    assert torch.equal(wrapper(inputs()), model(inputs()))
    applied.undo()
    assert torch.equal(wrapper(inputs()), want)
