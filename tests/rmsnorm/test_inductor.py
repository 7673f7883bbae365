"""What Inductor compiles is right, really runs, and is compiled a handful of times."""

from __future__ import annotations

import threading

import pytest
import torch
from support.thorough import first_quick, thorough
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseplug_backends.inductor import compiled
from fuseplug_rmsnorm import functional
from fuseplug_rmsnorm.backends import inductor
from fuseplug_rmsnorm.kernels import InductorRMSNormKernel
from fuseplug_rmsnorm.recognise.adapters import NormAdapter
from fuseplug_rmsnorm.reference import VARIANTS
from fuseplug_rmsnorm.reference import rms_norm as reference

pytestmark = pytest.mark.skipif(
    InductorRMSNormKernel().unavailable("cpu") is not None, reason="Inductor needs a C++ compiler"
)

EPS = 1e-5
MIXES = [
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


@pytest.fixture
def ran(everything_compiled, monkeypatch):
    """Counts the compiled programs that are started; small inputs are compiled for as well."""
    started = []
    run = type(inductor._fused)._run

    def counted(self, constants, needs, *tensors):
        started.append(needs)
        return run(self, constants, needs, *tensors)

    monkeypatch.setattr(type(inductor._fused), "_run", counted)
    return started


def tensors(variant="llama", x=torch.float32, weight=torch.float32, shape=(3, 5, 48)):
    generator = torch.Generator().manual_seed(0)
    gate = torch.randn(shape, generator=generator).to(x) if VARIANTS[variant].gate else None
    scale = torch.logspace(-4, 1, shape[-2]).unsqueeze(-1) if len(shape) > 1 else 1.0
    values = (torch.randn(shape, generator=generator) * scale).to(x)
    found = [values, torch.randn(shape[-1], generator=generator).to(weight), gate]
    return [t if t is None else t.requires_grad_() for t in found]


def outcome(function, x, weight, gate, variant, group_size=None, wide=False):
    ins = [t if t is None else t.double() if wide else t for t in (x, weight, gate)]
    out = function(ins[0], ins[1], EPS, variant=variant, gate=ins[2], group_size=group_size)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    leaves = [t for t in (x, weight, gate) if t is not None]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad, allow_unused=True)]


def assert_right(x, weight, gate=None, variant="llama", group_size=None, function=inductor.rms_norm):
    found = outcome(function, x, weight, gate, variant, group_size)
    eager = outcome(reference, x, weight, gate, variant, group_size)
    truth = outcome(reference, x, weight, gate, variant, group_size, wide=True)
    for ours, theirs, exact in zip(found, eager, truth, strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.shape == theirs.shape
        error, allowed = ((t.double() - exact.double()).abs() for t in (ours, theirs))
        size = exact.double().abs()
        if exact.numel():
            # Four roundings and those of the arithmetic in float32, or twice what the original is off, row by row.
            working = 16 + (x.numel() / max(x.shape[-1], 1)) ** 0.5 / 4
            share = 4 * torch.finfo(ours.dtype).eps + working * torch.finfo(torch.float32).eps
            limit = torch.maximum(2 * allowed.amax(-1), share * size.amax(-1))
            assert (error.amax(-1) <= limit).all()


@pytest.mark.parametrize("dtypes", first_quick(map(pytest.param, MIXES)), ids=str)
@pytest.mark.parametrize("variant", first_quick(["llama", "cast-last", "t5"]))
def test_mixed_dtypes_are_right_compiled(ran, variant, dtypes):
    assert_right(*tensors(variant, *dtypes), variant=variant)
    assert len(ran) == 2


@pytest.mark.parametrize("variant", first_quick(["gate-first", "gemma", "gated-silu-cast-last"]))
def test_groups_are_right_compiled(ran, variant):
    assert_right(*tensors(variant), variant=variant, group_size=16)
    assert len(ran) == 2


def test_without_a_weight(ran):
    x, _, _ = tensors()
    assert_right(x, None)
    assert len(ran) == 2


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (1, 8), (1, 1, 8), (5, 1), (1, 1), (7, 13), (2, 2, 2, 31)])
@pytest.mark.parametrize("variant", first_quick(["llama", "gate-first"]))
def test_edges_of_shape(ran, variant, shape):
    assert_right(*tensors(variant, shape=shape), variant=variant)


def test_an_eps_of_zero(ran):
    x, weight, _ = tensors()
    torch.testing.assert_close(inductor.rms_norm(x, weight, 0.0), reference(x, weight, 0.0))
    assert ran


@pytest.mark.parametrize(("x_needs", "weight_needs"), first_quick([(True, False), (False, True)]))
def test_only_the_gradients_that_are_needed(ran, x_needs, weight_needs):
    x, weight, _ = tensors()
    x.requires_grad_(x_needs)
    weight.requires_grad_(weight_needs)
    wanted = x if x_needs else weight
    (found,) = torch.autograd.grad(inductor.rms_norm(x, weight, EPS).sum(), wanted)
    (expected,) = torch.autograd.grad(reference(x, weight, EPS).sum(), wanted)
    torch.testing.assert_close(found, expected)
    assert ran == [None, (x_needs, weight_needs, False)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_gradient_is_wanted(ran, context):
    x, weight, _ = tensors()
    with context():
        found = inductor.rms_norm(x, weight, EPS)
        torch.testing.assert_close(found, reference(x, weight, EPS))
    assert found.grad_fn is None
    assert ran == [None]


def test_double_backward(ran):
    x, weight, _ = tensors()
    found, expected = [], []
    for function, into in ((inductor.rms_norm, found), (reference, expected)):
        first = torch.autograd.grad(function(x, weight, EPS).square().sum(), (x, weight), create_graph=True)
        # As shares of the largest: the sine of a large gradient is as uncertain as its last digits.
        shares = [g / g.detach().abs().max() for g in first]
        into += torch.autograd.grad(sum(share.sin().sum() for share in shares), (x, weight))
    # The forwards differ by a rounding, which two derivatives of rows as small as √eps enlarge.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ran


def test_double_backward_where_one_input_comes_from_the_other(ran):
    x, weight, _ = tensors()
    found, expected = (
        torch.autograd.grad(f(x, weight, EPS, variant="gated-silu", gate=x.sin()).sum(), x, create_graph=True)[0]
        for f in (inductor.rms_norm, reference)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(ran, use_reentrant):
    x, weight, _ = tensors()
    out = checkpoint(inductor.rms_norm, x, weight, EPS, use_reentrant=use_reentrant)
    found = torch.autograd.grad(out.sum(), weight) if not use_reentrant else out.sum().backward() or (weight.grad,)
    torch.testing.assert_close(found, torch.autograd.grad(reference(x, weight, EPS).sum(), weight))
    assert len(ran) == 3


def test_functorch_and_forward_mode_see_the_reference(ran):
    x, weight, _ = (t if t is None else t.detach() for t in tensors())

    def ours(x): return inductor.rms_norm(x, weight, EPS)  # fmt: skip

    def theirs(x): return reference(x, weight, EPS)  # fmt: skip

    for transform in (
        torch.vmap,
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    ):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))
    assert not ran


def test_dispatch_modes_and_subclasses_see_the_reference(ran):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert inductor.rms_norm(mode.from_tensor(torch.randn(4, 8)), None).shape == (4, 8)
    assert not ran


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))
        self.eps = EPS


Norm.forward = NormAdapter("llama", "weight", "eps").bind(inductor.rms_norm)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_exports_and_traces(ran):
    module, (x, _, _) = Norm(48), tensors()
    expected = reference(x, module.weight, EPS)
    torch.testing.assert_close(torch.export.export(module, (x.detach(),)).module()(x), expected)
    torch.testing.assert_close(torch.jit.trace(module, (x,), check_trace=False)(x), expected)
    assert not ran


@pytest.mark.parametrize("variant", ["llama", "no-upcast", "torch"])
def test_autocast_changes_what_it_changes_for_the_reference_and_no_more(ran, variant):
    x, weight, _ = tensors(variant, torch.bfloat16, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (f(x, weight, EPS, variant=variant) for f in (inductor.rms_norm, reference))
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_threads_may_all_be_first(ran, monkeypatch):
    monkeypatch.setattr(inductor._fused, "_programs", {})
    x, weight, _ = tensors(shape=(17, 40))
    found = []
    threads = [threading.Thread(target=lambda: found.append(inductor.rms_norm(x, weight, EPS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        torch.testing.assert_close(each, reference(x, weight, EPS))


@pytest.mark.parametrize("shape", [(1, 1, 48), (5, 1), (1, 1)], ids=str)
def test_one_row_and_rows_of_one_element_run_compiled(ran, shape):
    x, weight, _ = tensors(shape=shape)
    assert_right(x, weight)
    assert None in ran
    assert len(set(ran)) == 2, "forward and backward"


def test_one_forward_and_one_backward_are_compiled_for_each_width_whatever_the_shapes(ran, monkeypatch):
    monkeypatch.setattr(inductor._fused, "_programs", {})
    for shape in [
        (4, 6, 48),
        (7, 48),
        (2, 3, 5, 48),
        (48, 48),
        (3, 32),
        (300, 32),
        (0, 32),
        (2, 32),
    ]:
        x, weight, _ = tensors(shape=shape)
        for w in (weight, nn.Parameter(weight.detach())):
            inductor.rms_norm(x, w, EPS).sum().backward()
            with torch.no_grad():
                inductor.rms_norm(x, w, EPS)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inductor.rms_norm(x, w, EPS).sum().backward()
    assert [each.compilations for each in inductor._fused._programs.values()] == [1, 1, 1, 1]


@thorough
def test_many_dtypes_and_variants_are_right(ran):
    for variant in ("llama", "cast-last", "gemma", "t5", "cast-last-pow"):
        for dtype in (torch.float32, torch.bfloat16):
            assert_right(*tensors(variant, dtype, dtype), variant=variant)
    assert len(ran) == 20


@pytest.mark.parametrize(("rows", "is_compiled"), [(3, False), (600, True)])
def test_who_calls_the_public_function_pays_for_a_compiled_call_where_it_is_worth_it(rows, is_compiled):
    x, weight, _ = tensors(shape=(rows, 512))
    assert (rows * 512 >= compiled.SMALL) == is_compiled
    for function, runs in ((functional.rms_norm, is_compiled), (inductor.rms_norm, True)):
        assert (type(function(x, weight, EPS).grad_fn).__name__ == "_RecordedBackward") == runs


@thorough
def test_a_gradient_summed_over_many_rows_stays_within_what_a_sum_in_sequence_loses():
    x, weight, _ = tensors(shape=(16384, 16))
    assert_right(x.detach().requires_grad_(), weight)
