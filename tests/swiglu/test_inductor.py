"""Inductor's programs for gated MLPs are right, and are compiled only a handful of times."""

import copy
import math
import pickle
import threading

import pytest
import torch
from support.gates import BF16, HALF, INNER, SINGLE, TOLERANCE, both, options, tensors
from support.recorded import uncompiled
from support.thorough import few_on, first_quick, thorough
from torch import nn

from fuseplug_backends.inductor import compiled, program
from fuseplug_swiglu import functional
from fuseplug_swiglu.backends import inductor
from fuseplug_swiglu.kernels import InductorSwiGLUKernel
from fuseplug_swiglu.reference import LAYOUTS, VARIANTS
from fuseplug_swiglu.reference import swiglu as reference
from fuseplug_swiglu.specimens import mlps

# Each variant and layout once, and each activation of several operations: all combinations would compile for minutes.
COMBINATIONS = [
    ("silu", "plain", "gate-second", BF16),
    ("silu", "plain", None, SINGLE),
    ("gelu", "wide", None, BF16),
    ("gelu_new", "clamp-after", "interleaved", SINGLE),
    ("swish", "clamp-before-offset", "gate-first", HALF),
    ("relu2", "scaled", None, SINGLE),
    ("gelu_tanh", "sparse", "gate-first", SINGLE),
    ("quick_gelu", "clamp-before", None, BF16),
]


@pytest.fixture
def traced(ran, monkeypatch):
    """The programs that are started, recorded without compiling them to machine code, for tests that count them."""
    monkeypatch.setattr(inductor._fused, "_programs", {})
    monkeypatch.setattr(program, "compiled_by_inductor", uncompiled)
    return ran


@pytest.mark.parametrize(("activation", "variant", "layout", "dtype"), first_quick(COMBINATIONS))
def test_values_and_gradients_are_right_compiled(ran, backend, activation, variant, layout, dtype):
    functions = both(inductor, **options(activation, variant, layout))
    backend.assert_right(*functions, tensors(layout, dtype), TOLERANCE["inductor"])
    assert len(ran) == 2, "the forward and the backward run compiled"


def test_every_variant_and_layout_is_compiled_once():
    _, variants, layouts, _ = map(set, zip(*COMBINATIONS, strict=True))
    assert variants == set(VARIANTS)
    assert layouts == {None, *LAYOUTS}


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30, -0.0])
def test_what_is_not_finite_comes_out_of_a_program_as_in_the_original(ran, value):
    how = {"activation": "silu", "variant": "clamp-before", "limit": 7.0}
    gate, up = tensors().values()
    for gate_value, up_value in ((value, 1.0), (1.0, -value), (-value, value)):
        gate[0, 0, :8], up[0, 0, :8] = gate_value, up_value
        torch.testing.assert_close(inductor.swiglu(gate, up, **how), reference(gate, up, **how), equal_nan=True)
    assert ran


@pytest.mark.parametrize("shape", few_on("inductor", [(1, 1), (1, 1, INNER), (5, 1)], 1), ids=str)
def test_one_row_and_rows_of_one_element_run_compiled(ran, backend, shape):
    backend.assert_right(*both(inductor), tensors(shape=shape), TOLERANCE["inductor"])
    assert len(ran) == 2


@pytest.mark.parametrize(("rows", "is_compiled"), [(3, False), (1100, True)])
def test_what_is_small_runs_as_it_is_by_the_public_function(backend, rows, is_compiled):
    assert (rows * 64 >= compiled.SMALL) == is_compiled
    functional.swiglu(*(torch.randn(rows, 64) for _ in range(2)))
    assert bool(backend.launches) == is_compiled


@pytest.mark.parametrize(("activation", "compiles"), [("silu", True), ("gelu_new", False), ("relu2", False)])
def test_what_autocast_would_widen_is_not_compiled_under_it(backend, activation, compiles):
    gate, up = tensors().values()
    with torch.autocast("cpu", dtype=BF16):
        inductor.swiglu(gate, up, activation=activation)
    assert bool(backend.launches) == compiles


def test_threads_may_all_be_first(traced):
    gate, up = tensors(shape=(17, 40)).values()
    results = []
    threads = [threading.Thread(target=lambda: results.append(inductor.swiglu(gate, up))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, reference(gate, up))


def test_one_forward_and_one_backward_are_compiled_for_each_width_whatever_the_shapes(traced):
    for shape in [(4, 6, 48), (7, 48), (2, 3, 5, 48), (48, 48), (3, 32), (300, 32), (0, 32)]:
        inputs = [t.requires_grad_() for t in tensors(shape=shape).values()]
        inductor.swiglu(*inputs).sum().backward()
        with torch.no_grad():
            inductor.swiglu(*inputs)
    assert traced
    assert 0 < sum(program.compilations for program in inductor._fused._programs.values()) <= 6


@pytest.mark.xdist_group("fused gates")  # a program compiled for one test serves the next
class TestModules:
    @pytest.fixture
    def fused(self, alone, ran, small_checks):
        """Fuses a module with the kernel itself, including its check."""

        def fuse(module):
            applied = alone(InductorSwiGLUKernel).apply_all(module)
            assert applied.report.fused, applied.report
            ran.clear()
            return applied

        return fuse

    @pytest.mark.parametrize(
        ("make", "dtype"),
        [
            (lambda: mlps.Separate(nn.SiLU()), SINGLE),
            pytest.param(lambda: mlps.InOne(nn.SiLU(), "gate-second"), BF16, marks=thorough),
            pytest.param(mlps.WidePath, SINGLE, marks=thorough),
        ],
        ids=["separate", "in one", "wide path"],
    )
    def test_fused_they_compute_what_they_did(self, fused, outcome, ran, make, dtype):
        module, x = make().to(dtype), torch.randn(2, 5, mlps.HIDDEN).to(dtype)
        eager = outcome(module, x)
        with fused(module) as applied:
            assert {entry.check for entry in applied.report.fused} == {"passed"}
            results = outcome(module, x)
            assert len(ran) == 2
        for name, value in eager.items():
            atol = (16 * torch.finfo(dtype).eps + 1e-6) * value.abs().max().item()
            torch.testing.assert_close(results[name], value, rtol=0, atol=atol, msg=name)

    @thorough
    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_they_compile_as_one_graph_export_and_trace(self, fused, ran):
        module, x = mlps.Separate(nn.SiLU()), torch.randn(4, mlps.HIDDEN)
        expected = module(x)
        with fused(module):
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            exported = torch.export.export(module, (x,)).module()
            for function in (compiled, exported, torch.jit.trace(module, (x,), check_trace=False)):
                torch.testing.assert_close(function(x), expected)
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
        with torch.autocast("cpu", dtype=BF16):
            eager = module(x)
        with fused(module), torch.autocast("cpu", dtype=BF16):
            y = module(x)
        assert ran
        assert y.dtype is eager.dtype is BF16
        torch.testing.assert_close(y, eager, rtol=2e-2, atol=2e-2)
