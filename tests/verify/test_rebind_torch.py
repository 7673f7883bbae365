"""The part that needs torch: modules, torch.compile and a model of transformers."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import itertools
import pickle
import sys
import types

import pytest
from support.thorough import covering, thorough

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounter  # noqa: E402

from fuseplug_verify import rebound  # noqa: E402

TOY = """
import torch
from torch import nn


def turn(x, y):
    return x + y


class Layer(nn.Module):
    def __init__(self, value=3.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return turn(x * self.weight, 1.0)


class Decorated(Layer):
    forward = decorate(decorate(Layer.forward))


class Model(nn.Module):
    def __init__(self, layer, n):
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(n)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""

serial = itertools.count()
X = torch.tensor([1.0, -2.0, 5.0])


def plus(x, y):
    return x + y


def minus(x, y):
    return x - y


def times(x, y):
    return x * y * 7


def decorate(method):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


def closing_over(amount):
    def turn(x, y):
        return x - y * amount

    return turn


@pytest.fixture
def toy(tmp_path, monkeypatch):
    # A name of its own, too: Dynamo remembers the modules that it imported by name.
    path = tmp_path / f"rebind_toy_{next(serial)}.py"
    path.write_text(TOY)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    module.decorate = decorate
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    torch._dynamo.reset()
    yield module
    torch._dynamo.reset()


def patch(layer, replacement, name="turn"):
    layer.__dict__["forward"] = types.MethodType(rebound(type(layer).forward, {name: replacement}), layer)


def undo(layer):
    layer.__dict__.pop("forward", None)


def patch_all(model, functions):
    """Patch one layer per function; None leaves a layer as its class has it."""
    for layer, function in zip(model.layers, functions, strict=True):
        undo(layer)
        if function is not None:
            patch(layer, function)


def expected(functions, x=X):
    for function in functions:
        x = (function or plus)(x * 3.0, 1.0)
    return x


def aliases(module):
    return [name for name in vars(module) if name.startswith("_fuseplug")]


class TestModules:
    def test_one_instance_only(self, toy):
        one, other = toy.Model(toy.Layer, 3), toy.Model(toy.Layer, 3)
        patch_all(one, [minus, None, times])
        assert torch.equal(one(X), expected([minus, None, times]))
        assert torch.equal(other(X), expected([None] * 3))

    def test_undo_is_exact(self, toy):
        layer = toy.Layer()
        before = dict(vars(layer))
        patch(layer, minus)
        undo(layer)
        assert vars(layer) == before
        assert torch.equal(layer(X), expected([None]))
        assert not aliases(toy)

    def test_gradients_flow_through_the_replacement(self, toy):
        layer = toy.Layer()
        patch(layer, times)
        layer(X).sum().backward()
        assert layer.weight.grad == X.sum() * 7

    def test_a_deep_copy_is_patched_and_is_its_own(self, toy):
        layer = toy.Layer()
        patch(layer, minus)
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            twin.weight.fill_(10.0)
        assert torch.equal(twin(X), X * 10 - 1)
        assert torch.equal(layer(X), expected([minus]))
        undo(layer)
        assert torch.equal(twin(X), X * 10 - 1)
        undo(twin)
        assert not aliases(toy)

    @pytest.mark.parametrize("kind", ["Layer", "Decorated"])
    def test_a_pickle_brings_back_the_original(self, toy, kind):
        model = toy.Model(getattr(toy, kind), 2)
        patch_all(model, [minus, minus])
        back = pickle.loads(pickle.dumps(model))
        assert torch.equal(back(X), expected([None, None]))
        assert back.layers[0].forward.__func__ is getattr(toy, kind).forward
        assert torch.equal(model(X), expected([minus, minus]))

    def test_recomputation_after_undo(self, toy):
        from torch.utils.checkpoint import checkpoint

        layer = toy.Layer()
        patch(layer, times)
        y = checkpoint(layer.forward, X.clone().requires_grad_(), use_reentrant=False)
        undo(layer)
        gc.collect()
        y.sum().backward()
        assert layer.weight.grad == X.sum() * 7


def whole(model, backend="eager"):
    return torch.compile(model, backend=backend, fullgraph=True)


def per_layer(model, backend="eager"):
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return model


MIXES = {
    "all": [minus, minus, minus, minus],
    "half": [minus, minus, None, None],
    "every other": [None, minus, None, minus],
    "two alternating": [minus, times, minus, times],
    "two and none": [minus, None, times, minus],
}
AMOUNT_2, AMOUNT_5 = closing_over(2), closing_over(5)
MIXES["closures"] = [AMOUNT_2, None, AMOUNT_5, AMOUNT_2]

granularity = pytest.mark.parametrize("compiled", [whole, per_layer])
KINDS = ("Layer", "Decorated")
kinds = pytest.mark.parametrize("kind", KINDS)
every_way = pytest.mark.parametrize(
    ("mix", "compiled", "kind"), covering(itertools.product(MIXES, [whole, per_layer], KINDS))
)


class TestCompile:
    @every_way
    def test_patched_before(self, toy, compiled, kind, mix):
        model = toy.Model(getattr(toy, kind), 4)
        patch_all(model, MIXES[mix])
        assert torch.equal(compiled(model)(X), expected(MIXES[mix]))

    @every_way
    def test_apply_undo_and_reapply_after(self, toy, compiled, kind, mix):
        model = toy.Model(getattr(toy, kind), 4)
        run = compiled(model)
        none = [None] * 4
        for functions in (none, MIXES[mix], none, MIXES[mix], MIXES["all"], none):
            patch_all(model, functions)
            assert torch.equal(run(X), expected(functions))

    @pytest.mark.parametrize(("mix", "kind"), covering(itertools.product(MIXES, KINDS)))
    def test_patched_and_unpatched_in_one_graph(self, toy, kind, mix):
        layer = getattr(toy, kind)
        patched, plain, other = toy.Model(layer, 4), toy.Model(layer, 4), toy.Model(layer, 4)
        patch_all(patched, MIXES[mix])
        patch_all(other, [times] * 4)

        @torch.compile(backend="eager", fullgraph=True)
        def run(x):
            return plain(x), patched(x), other(x), plain(x)

        outputs = run(X)
        for output, functions in zip(outputs, ([None] * 4, MIXES[mix], [times] * 4, [None] * 4), strict=True):
            assert torch.equal(output, expected(functions))

    @granularity
    def test_another_model_compiled_before_and_after(self, toy, compiled):
        plain, patched = toy.Model(toy.Layer, 4), toy.Model(toy.Layer, 4)
        run_plain, run_patched = compiled(plain), compiled(patched)
        assert torch.equal(run_plain(X), expected([None] * 4))
        patch_all(patched, [minus] * 4)
        assert torch.equal(run_patched(X), expected([minus] * 4))
        assert torch.equal(run_plain(X), expected([None] * 4))

    @granularity
    def test_a_changed_closure_is_seen(self, toy, compiled):
        amount = 2

        def turn(x, y):
            return x - y * amount

        model = toy.Model(toy.Layer, 2)
        patch_all(model, [turn, turn])
        run = compiled(model)
        assert torch.equal(run(X), expected([AMOUNT_2, AMOUNT_2]))
        amount = 5
        assert torch.equal(run(X), expected([AMOUNT_5, AMOUNT_5]))

    @kinds
    @granularity
    def test_compilations_do_not_grow_with_the_layers(self, toy, compiled, kind):
        counts = {}
        for n in (2, 7):
            torch._dynamo.reset()
            model, counter = toy.Model(getattr(toy, kind), n), CompileCounter()
            patch_all(model, [minus] * n)
            with torch.no_grad():  # or the second layer's input, which wants a gradient, is another case
                assert torch.equal(compiled(model, counter)(X), expected([minus] * n))
            counts[n] = counter.frame_count
        assert counts == {2: 1, 7: 1}

    @granularity
    def test_a_copy_that_is_held_is_not_compiled_again(self, toy, compiled):
        model, counter = toy.Model(toy.Layer, 3), CompileCounter()
        held = rebound(toy.Layer.forward, {"turn": minus})
        run = compiled(model, counter)
        with torch.no_grad():
            for _ in range(4):
                for functions in ([minus] * 3, [None] * 3):
                    patch_all(model, functions)
                    assert torch.equal(run(X), expected(functions))
        assert counter.frame_count == 2
        assert held(toy.Layer(), X) is not None

    @granularity
    def test_the_alias_goes_with_the_last_user_after_compiling_too(self, toy, compiled):
        model = toy.Model(toy.Layer, 2)
        patch_all(model, [minus, minus])
        compiled(model)(X)
        patch_all(model, [None, None])
        gc.collect()
        assert not aliases(toy)

    @granularity
    def test_gradients(self, toy, compiled):
        model = toy.Model(toy.Layer, 2)
        patch_all(model, [times, None])
        run = functools.partial(compiled(model, "aot_eager"), X)
        run().sum().backward()
        gradients = [layer.weight.grad.clone() for layer in model.layers]
        model.zero_grad()
        model(X).sum().backward()
        assert gradients == [layer.weight.grad for layer in model.layers]

    @thorough
    def test_inductor(self, toy):
        model, plain = toy.Model(toy.Layer, 4), toy.Model(toy.Layer, 4)
        patch_all(model, MIXES["two and none"])

        @torch.compile
        def run(x):
            return model(x), plain(x)

        with torch.no_grad():
            outputs = run(X)
        torch.testing.assert_close(outputs, (expected(MIXES["two and none"]), expected([None] * 4)))


class TestTransformers:
    NAME = "apply_rotary_pos_emb"

    @pytest.fixture(params=["llama", "qwen3"])
    def models(self, request):
        transformers = pytest.importorskip("transformers")
        configuration, model = {
            "llama": (transformers.LlamaConfig, transformers.LlamaModel),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3Model),
        }[request.param]
        config = configuration(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
        torch.manual_seed(0)
        one = model(config).eval()
        other = copy.deepcopy(one)
        torch._dynamo.reset()
        yield one, other
        torch._dynamo.reset()

    @staticmethod
    def unturned(q, k, cos, sin, unsqueeze_dim=1):
        return q, k

    @staticmethod
    def run(model):
        with torch.no_grad():
            return model(torch.arange(8)[None], use_cache=False).last_hidden_state

    def patch_attention(self, model, replacement, layers=(0, 1)):
        for layer in layers:
            patch(model.layers[layer].self_attn, replacement, self.NAME)

    def reference(self, model, replacement, monkeypatch):
        """What the model computes when the global itself is replaced."""
        module = sys.modules[type(model).__module__]
        with monkeypatch.context() as context:
            context.setattr(module, self.NAME, replacement)
            return self.run(model)

    def test_one_model_only_and_back(self, models, monkeypatch):
        one, other = models
        module = sys.modules[type(one).__module__]
        names, before = set(vars(module)), self.run(one)
        after = self.reference(one, self.unturned, monkeypatch)
        assert not torch.allclose(before, after)

        self.patch_attention(one, self.unturned)
        assert torch.equal(self.run(one), after)
        assert torch.equal(self.run(other), before)
        for layer in one.layers:
            undo(layer.self_attn)
        assert torch.equal(self.run(one), before)
        assert set(vars(module)) == names

    def test_compiled_with_half_of_the_layers_patched(self, models):
        one, other = models
        self.patch_attention(one, self.unturned, layers=(1,))
        expected = self.run(one), self.run(other)

        @torch.compile(backend="eager")
        def both():
            return self.run(one), self.run(other)

        torch.testing.assert_close(both(), expected)
        assert not torch.allclose(*expected)
