"""What Inductor compiles is right, really runs, and is compiled a handful of times."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import pytest
import torch
from support.thorough import covering, first_quick, thorough
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.inductor import compiled
from fuseplug_swiglu import functional
from fuseplug_swiglu.backends import inductor
from fuseplug_swiglu.kernels import InductorSwiGLUKernel
from fuseplug_swiglu.reference import LAYOUTS, VARIANTS
from fuseplug_swiglu.reference import swiglu as reference
from fuseplug_swiglu.specimens import mlps

LOW = (torch.bfloat16, torch.float16)
NUMBERS = {"limit": 0.75, "scale": 0.4, "sparsity": 0.6}
PLAIN = {"activation": "silu"}
# Each variant and layout once, and the activations of several operations; all combinations would compile for minutes.
COMBINATIONS = [
    ("silu", "plain", "separate", torch.float32),
    ("silu", "plain", "gate-second", torch.bfloat16),
    ("gelu", "wide", "separate", torch.bfloat16),
    ("gelu_new", "clamp-after", "interleaved", torch.float32),
    ("swish", "clamp-before-offset", "gate-first", torch.float16),
    ("relu2", "scaled", "separate", torch.float32),
    ("gelu_tanh", "sparse", "gate-first", torch.float32),
    ("quick_gelu", "clamp-before", "separate", torch.bfloat16),
]


def options(activation="silu", variant="plain", layout="separate"):
    found = {"activation": activation, "variant": variant, "beta": 1.702}
    found |= {} if layout == "separate" else {"layout": layout}
    return found | {name: NUMBERS[name] for name in VARIANTS[variant].needs}


def tensors(layout="separate", dtype=torch.float32, shape=(3, 5, 48)):
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 1, shape[-2]).unsqueeze(-1) if len(shape) > 1 else 1.0
    width = shape[-1] * (1 if layout == "separate" else 2)
    pair = [(torch.randn(*shape[:-1], width, generator=generator) * scale).to(dtype) for _ in range(2)]
    return [t.requires_grad_() for t in pair[: 2 if layout == "separate" else 1]]


def outcome(function, inputs, how, wide=False):
    ins = [t.double() if wide else t for t in inputs]
    out = function(*ins, **how)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def assert_right(inputs, how, function=inductor.swiglu):
    found, eager, truth = (
        outcome(function, inputs, how),
        outcome(reference, inputs, how),
        outcome(reference, inputs, how, wide=True),
    )
    for ours, theirs, exact in zip(found, eager, truth, strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.shape == theirs.shape
        if exact.numel():
            error, allowed = ((t.double() - exact.double()).abs() for t in (ours, theirs))
            # Four roundings and those of the arithmetic in float32, or twice what the original is off, row by row.
            share = 4 * torch.finfo(ours.dtype).eps + 16 * torch.finfo(torch.float32).eps
            limit = torch.maximum(2 * allowed.amax(-1), share * exact.double().abs().amax(-1))
            assert (error.amax(-1) <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("layout", ["separate", "gate-second"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_right_small(activation, variant, layout, dtype):
    assert_right(tensors(layout, dtype), options(activation, variant, layout))


@pytest.mark.parametrize(("activation", "variant", "layout", "dtype"), first_quick(COMBINATIONS, 2))
def test_values_and_gradients_are_right_compiled(ran, activation, variant, layout, dtype):
    assert_right(tensors(layout, dtype), options(activation, variant, layout))
    assert len(ran) == 2, "the forward and the backward run compiled"


def test_every_variant_and_layout_is_compiled_once():
    _, variants, layouts, _ = map(set, zip(*COMBINATIONS, strict=True))
    assert variants == set(VARIANTS)
    assert layouts == {"separate", *LAYOUTS}


def test_what_is_small_runs_as_it_is_by_the_public_function(monkeypatch):
    started = []
    monkeypatch.setattr(inductor, "_fused", lambda constants, gate, up: started.append(gate) or gate * up)
    for size in (compiled.SMALL // 2, compiled.SMALL):
        functional.swiglu(*(torch.randn(size // 64, 64, requires_grad=True) for _ in range(2)))
    assert [gate.numel() for gate in started] == [compiled.SMALL]


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48), (48,), (1, 48), (1, 1, 48), (5, 1), (1, 1), (2, 2, 7, 13)])
@pytest.mark.parametrize("layout", first_quick(["separate", "gate-first"]))
def test_edges_of_shape(ran, layout, shape):
    assert_right(tensors(layout, shape=shape), options(layout=layout))


@pytest.mark.parametrize(
    ("lay", "layout"),
    covering(
        [
            pytest.param(lambda t: t.transpose(0, 1), "separate", id="transposed"),
            pytest.param(lambda t: t[:1].expand(4, -1, -1), "separate", id="expanded"),
            pytest.param(lambda t: t[..., ::2], "separate", id="strided"),
            pytest.param(lambda t: t[:, ::2], "gate-first", id="every other row"),
            pytest.param(lambda t: t[..., 24:72], "gate-first", id="part of wider rows"),
        ],
        by=lambda lay, layout: [layout],
    ),
)
def test_any_layout_in_memory(ran, lay, layout):
    whole = tensors(layout)
    before = [t.detach().clone() for t in whole]
    assert_right([lay(t) for t in whole], options(layout=layout))
    assert len(ran) == 2
    assert all(map(torch.equal, whole, before))


def test_the_gradient_of_gate_and_up_in_one_is_one_tensor(ran):
    (both,) = tensors("gate-first")
    (gradient,) = torch.autograd.grad(inductor.swiglu(both).sum(), both)
    torch.testing.assert_close(gradient, torch.autograd.grad(reference(both).sum(), both)[0])
    assert ran == [None, (True, False)]


def test_nothing_is_kept_for_the_backward_but_gate_and_up(ran):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for layout in ("separate", "gate-first"):
            inputs = tensors(layout)
            kept.clear()
            inductor.swiglu(*inputs, **options("gelu_new", layout=layout))
            assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in inputs]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -0.0])
@pytest.mark.parametrize(
    "how", [PLAIN, {"activation": "gelu_tanh"}, {"activation": "silu", "variant": "clamp-before", "limit": 7.0}]
)
def test_what_is_not_finite_comes_out_as_in_the_original(ran, how, value):
    gate, up = (t.detach() for t in tensors())
    for gate_value, up_value in ((value, 1.0), (1.0, value), (value, value)):
        gate[0, 0, :8], up[0, 0, :8] = gate_value, up_value
        torch.testing.assert_close(inductor.swiglu(gate, up, **how), reference(gate, up, **how), equal_nan=True)
    assert ran


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_refused_as_by_the_reference(dtype):
    gate = torch.ones(4, 8, dtype=dtype)
    with pytest.raises(RuntimeError) as theirs:
        reference(gate, gate)
    with pytest.raises(RuntimeError) as ours:
        inductor.swiglu(gate, gate)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_the_gradients_that_are_needed(ran, needs):
    gate, up = (t.requires_grad_(need) for t, need in zip(tensors(), needs, strict=True))
    wanted = gate if needs[0] else up
    (found,) = torch.autograd.grad(inductor.swiglu(gate, up).sum(), wanted)
    torch.testing.assert_close(found, torch.autograd.grad(reference(gate, up).sum(), wanted)[0])
    assert ran == [None, needs]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("by_hand", [True, False])
def test_nothing_is_recorded_where_no_gradient_is_wanted(ran, context, by_hand):
    gate, up = tensors()
    with context():
        found = (functional if by_hand else inductor).swiglu(gate, up)
        torch.testing.assert_close(found, reference(gate, up))
    assert found.grad_fn is None
    assert ran == ([] if by_hand else [None])


def test_mixed_dtypes_have_the_dtype_of_the_reference(ran):
    gate, up = tensors()
    for pair in ((gate.bfloat16(), up), (gate, up.bfloat16())):
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                found, expected = inductor.swiglu(*pair), reference(*pair)
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_double_backward(ran):
    found, expected = [], []
    for function, into in ((inductor.swiglu, found), (reference, expected)):
        inputs = tensors()
        first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
        into += torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert ran


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(ran, use_reentrant):
    inputs = tensors()
    checkpoint(inductor.swiglu, *inputs, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close([t.grad for t in inputs], list(torch.autograd.grad(reference(*inputs).sum(), inputs)))
    assert len(ran) == 3


def test_functorch_and_forward_mode_see_the_reference(ran):
    gate, up = (t.detach() for t in tensors())
    for transform in (
        torch.vmap,
        lambda f: torch.func.grad(lambda *t: f(*t).sum()),
        lambda f: lambda *t: torch.func.jvp(f, t, t),
    ):
        torch.testing.assert_close(transform(inductor.swiglu)(gate, up), transform(reference)(gate, up))
    assert not ran


def test_dispatch_modes_see_the_reference(ran):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        gate = mode.from_tensor(torch.randn(4, 8))
        assert inductor.swiglu(gate, gate).shape == (4, 8)
    assert not ran


def test_autocast_changes_what_it_changes_for_the_reference_and_no_more(ran):
    gate, up = tensors(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (f(gate, up) for f in (inductor.swiglu, reference))
    assert ran
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("activation", "compiles"), [("silu", True), ("gelu_new", False), ("relu2", False)])
def test_what_autocast_would_widen_is_not_compiled_under_it(ran, activation, compiles):
    gate, up = tensors()
    with torch.no_grad():
        inductor.swiglu(gate, up, activation=activation)
        assert ran == [None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inductor.swiglu(gate, up, activation=activation)
    assert ran == [None] * (1 + compiles)


def test_results_repeat_to_the_bit(ran):
    inputs = tensors(shape=(33, 64))
    once, again = (outcome(inductor.swiglu, inputs, PLAIN) for _ in range(2))
    assert all(map(torch.equal, once, again))


def test_threads_may_all_be_first(ran, monkeypatch):
    monkeypatch.setattr(inductor._fused, "_programs", {})
    gate, up = tensors(shape=(17, 40))
    found = []
    threads = [threading.Thread(target=lambda: found.append(inductor.swiglu(gate, up))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        torch.testing.assert_close(each, reference(gate, up))


def test_one_forward_and_one_backward_are_compiled_for_each_width_whatever_the_shapes(ran, monkeypatch):
    monkeypatch.setattr(inductor._fused, "_programs", {})
    for shape in [(4, 6, 48), (7, 48), (2, 3, 5, 48), (48, 48), (3, 32), (300, 32), (0, 32)]:
        inputs = tensors(shape=shape)
        inductor.swiglu(*inputs).sum().backward()
        with torch.no_grad():
            inductor.swiglu(*inputs)
    assert ran
    assert 0 < sum(each.compilations for each in inductor._fused._programs.values()) <= 6


@pytest.mark.xdist_group("fused gates")  # what is compiled for one serves the next
class TestModules:
    @pytest.fixture
    def fused(self, alone, ran):
        """Fuses a module with the kernel itself, its check included."""

        def fuse(module):
            applied = alone(InductorSwiGLUKernel).apply_all(module)
            assert applied.report.fused, applied.report
            ran.clear()
            return applied

        return fuse

    @pytest.mark.parametrize(
        ("make", "dtype"),
        [
            (lambda: mlps.Separate(nn.SiLU()), torch.float32),
            pytest.param(lambda: mlps.InOne(nn.SiLU(), "gate-second"), torch.bfloat16, marks=thorough),
            pytest.param(mlps.WidePath, torch.float32, marks=thorough),
        ],
        ids=["separate", "in one", "wide path"],
    )
    def test_fused_they_compute_what_they_did(self, fused, outcome, ran, make, dtype):
        module, x = make().to(dtype), torch.randn(2, 5, mlps.HIDDEN).to(dtype)
        eager = outcome(module, x)
        with fused(module) as applied:
            assert {entry.check for entry in applied.report.fused} == {"passed"}
            found = outcome(module, x)
            assert len(ran) == 2
        for name, value in eager.items():
            scale = value.abs().max().item()
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=(16 * torch.finfo(dtype).eps + 1e-6) * scale, msg=name
            )

    @thorough
    def test_they_compile_as_one_graph(self, fused, ran):
        module, x = mlps.InOne(nn.SiLU(), "gate-second"), torch.randn(4, mlps.HIDDEN)
        expected = module(x)
        with fused(module):
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), expected)
        assert not ran

    @thorough
    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_they_export_and_trace(self, fused, ran):
        module, x = mlps.Separate(nn.SiLU()), torch.randn(4, mlps.HIDDEN)
        expected = module(x)
        with fused(module):
            torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), expected)
            torch.testing.assert_close(torch.jit.trace(module, (x,), check_trace=False)(x), expected)
        assert not ran

    @thorough
    def test_they_are_copied_and_pickled(self, fused):
        module, x = mlps.Separate(nn.SiLU()), torch.randn(4, mlps.HIDDEN)
        expected = module(x)
        with fused(module):
            torch.testing.assert_close(copy.deepcopy(module)(x), expected)
            torch.testing.assert_close(pickle.loads(pickle.dumps(module))(x), expected)
        assert torch.equal(module(x), expected)

    def test_what_was_not_verified_goes_to_the_original(self, fused, ran):
        module = mlps.Separate(nn.SiLU())
        with fused(module):
            with pytest.raises(RuntimeError, match="dtype"):
                module(torch.ones(2, mlps.HIDDEN, dtype=torch.int64))
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                module(torch.ones(2, mlps.HIDDEN + 1))
            module.double()(torch.ones(2, mlps.HIDDEN, dtype=torch.float64))
        assert not ran

    def test_autocast_gives_the_projections_dtype(self, fused, ran):
        module, x = mlps.Separate(nn.SiLU()), torch.randn(4, 3, mlps.HIDDEN)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            eager = module(x)
        with fused(module), torch.autocast("cpu", dtype=torch.bfloat16):
            found = module(x)
        assert ran
        assert found.dtype is eager.dtype is torch.bfloat16
        torch.testing.assert_close(found, eager, rtol=2e-2, atol=2e-2)
