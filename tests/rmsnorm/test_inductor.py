"""Inductor's programs for RMSNorm are right, and are compiled only a handful of times."""

import threading

import pytest
import torch
from support.norms import BF16, HALF, SINGLE, TOLERANCE, both, tensors
from support.recorded import uncompiled
from support.thorough import few_on, first_quick, thorough
from torch import nn

from fuseplug_backends.inductor import compiled, program
from fuseplug_rmsnorm import functional, reference
from fuseplug_rmsnorm.backends import inductor
from fuseplug_rmsnorm.kernels import InductorRMSNormKernel
from fuseplug_rmsnorm.recognise.adapters import NormAdapter
from fuseplug_verify import Tolerance

pytestmark = [
    pytest.mark.skipif(InductorRMSNormKernel().unavailable("cpu") is not None, reason="Inductor needs a C++ compiler"),
    pytest.mark.usefixtures("everything_compiled"),
]
EPS = 1e-5
MIXES = [
    ("gate-first", SINGLE, SINGLE, 16),
    ("llama", HALF, HALF, None),
    ("t5", BF16, SINGLE, None),
    ("cast-last", SINGLE, BF16, None),
    ("gemma", SINGLE, SINGLE, 16),
    ("gated-silu-cast-last", SINGLE, SINGLE, 16),
    ("cast-last-pow", BF16, BF16, None),
    ("llama", SINGLE, None, None),
]


@pytest.fixture
def traced(monkeypatch):
    """Records programs without compiling them to machine code, for tests that count them."""
    monkeypatch.setattr(inductor._fused, "_programs", {})
    monkeypatch.setattr(program, "compiled_by_inductor", uncompiled)


@pytest.mark.parametrize(("variant", "x", "weight", "group_size"), first_quick(MIXES))
def test_mixes_are_right_compiled(backend, variant, x, weight, group_size):
    functions = both(inductor, variant, group_size=group_size)
    backend.assert_right(*functions, tensors(variant, x, weight), TOLERANCE)
    assert backend.launches["program"] == 2


@pytest.mark.parametrize("shape", few_on("inductor", [(1, 1), (1, 1, 48), (5, 1), (7, 13)]), ids=str)
def test_one_row_and_rows_of_one_element_run_compiled(backend, shape):
    backend.assert_right(*both(inductor), tensors(shape=shape), TOLERANCE)
    assert backend.launches["program"] == 2


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_exports_and_traces(backend):
    class Norm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(width))
            self.eps = EPS

    Norm.forward = NormAdapter("llama", "weight", "eps").bind(inductor.rms_norm)
    module, x = Norm(48), tensors()["x"]
    expected = reference.rms_norm(x, module.weight, EPS)
    torch.testing.assert_close(torch.export.export(module, (x,)).module()(x), expected)
    torch.testing.assert_close(torch.jit.trace(module, (x,), check_trace=False)(x), expected)
    assert not backend.launches


def test_threads_may_all_be_first(traced):
    arguments = tensors(shape=(17, 40))
    results = []
    threads = [threading.Thread(target=lambda: results.append(inductor.rms_norm(**arguments))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, reference.rms_norm(**arguments))


def test_one_forward_and_one_backward_are_compiled_for_each_width_whatever_the_shapes(traced):
    for shape in [(4, 6, 48), (7, 48), (2, 3, 5, 48), (48, 48), (3, 32), (300, 32), (0, 32), (2, 32)]:
        x, weight = (t.requires_grad_() for t in tensors(shape=shape).values())
        for w in (weight, nn.Parameter(weight.detach())):
            inductor.rms_norm(x, w, EPS).sum().backward()
            with torch.no_grad():
                inductor.rms_norm(x, w, EPS)
            with torch.autocast("cpu", dtype=BF16):
                inductor.rms_norm(x, w, EPS).sum().backward()
    assert [program.compilations for program in inductor._fused._programs.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize(("rows", "is_compiled"), [(3, False), (600, True)])
def test_who_calls_the_public_function_pays_for_a_compiled_call_where_it_is_worth_it(rows, is_compiled):
    x, weight = (t.requires_grad_() for t in tensors(shape=(rows, 512)).values())
    assert (rows * 512 >= compiled.SMALL) == is_compiled
    for function, runs in ((functional.rms_norm, is_compiled), (inductor.rms_norm, True)):
        assert (type(function(x, weight, EPS).grad_fn).__name__ == "_RecordedBackward") == runs


@thorough
def test_a_gradient_summed_over_many_rows_stays_within_what_a_sum_in_sequence_loses(backend):
    rows = 16384
    arguments = {"x": torch.randn(rows, 16), "weight": torch.randn(16)}
    backend.assert_right(*both(inductor), arguments, Tolerance(roundings=4.0, working_roundings=16 + rows**0.5 / 4))
