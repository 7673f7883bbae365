"""Tests of `rebind` that need torch: modules and torch.compile."""

import copy
import functools
import gc
import importlib.util
import itertools
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
    # Each test needs another module name, too: Dynamo remembers imported modules by name.
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
            with torch.no_grad():  # else the second layer's input requires a gradient: another case
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
