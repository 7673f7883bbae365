"""RMSNorm on an NPU in host memory: right in every variant, within the limits, and really by the operation."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from support.judging import assert_right, outcome
from support.thorough import covering

from fuseplug import KernelManager
from fuseplug_rmsnorm import reference
from fuseplug_rmsnorm.backends import npu
from fuseplug_rmsnorm.kernels import NpuRMSNormKernel
from fuseplug_rmsnorm.reference import VARIANTS
from fuseplug_rmsnorm.specimens import Llama
from fuseplug_verify import Tolerance

WIDTH = 48
TOLERANCE = Tolerance(roundings=4.0, working_roundings=20.0)
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BF16, SINGLE)
PAIRS = [*itertools.product(DTYPES, DTYPES), *((dtype, None) for dtype in DTYPES)]


def tensors(variant="llama", x=SINGLE, weight=SINGLE, gate=False, shape=(2, 6, WIDTH), scale=1.0):
    """Rows of several magnitudes, one of them zero; weights around one and around zero."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor((1.0, 1e-3, 16.0, 3e-4, 0.0, 1.0))[: shape[-2], None] if len(shape) > 1 else 1.0
    found = {"x": (scale * magnitudes * torch.randn(shape, generator=generator)).to(x)}
    if weight is not None:
        found["weight"] = (0.3 * torch.randn(shape[-1:], generator=generator) + torch.arange(shape[-1]) % 2).to(weight)
    if gate:
        found["gate"] = torch.randn(shape, generator=generator).to(x)
    return found


def both(variant="llama", **options):
    def called(function):
        return lambda **tensors: function(**tensors, variant=variant, **options)

    return called(npu.rms_norm), called(reference.rms_norm)


in_every_mix = pytest.mark.parametrize(("variant", "dtypes"), covering(itertools.product(VARIANTS, PAIRS)), ids=str)


@in_every_mix
def test_every_variant_in_every_mix_of_dtypes(host_npu, variant, dtypes):
    gates = (False, True) if VARIANTS[variant].gate else (False,)
    for gate, group_size in itertools.product(gates, (None, 16, WIDTH)):
        host_npu.calls.clear()
        assert_right(*both(variant, group_size=group_size), tensors(variant, *dtypes, gate), TOLERANCE)
        assert host_npu.calls["npu_rms_norm"] == host_npu.calls["npu_rms_norm_backward"] == 1
        assert not host_npu.calls["aten::_local_scalar_dense"]


@pytest.mark.parametrize(
    ("launches", "variant", "options", "made"),
    [
        (1, "llama", {}, {}),
        (1, "no-upcast-weight-first", {}, {}),
        (1, "t5", {}, {}),
        (1, "cast-last", {}, {"weight": SINGLE}),
        (2, "llama", {}, {"weight": None}),
        (2, "llama", {}, {"weight": SINGLE}),
        (2, "gemma-own-offset", {}, {}),
        (2, "gemma", {}, {"x": SINGLE, "weight": SINGLE}),
        (3, "gemma", {}, {}),
        (4, "gemma-input-scaled", {}, {}),
        (1, "gate-first", {"group_size": WIDTH}, {}),
        (3, "gate-first", {"group_size": 16}, {}),
        (3, "gate-first", {}, {"gate": True}),
        (3, "gated-silu", {}, {"gate": True}),
        (3, "gated-sigmoid-cast-last", {}, {"gate": True}),
    ],
)
def test_so_many_kernels_are_launched(host_npu, launches, variant, options, made):
    given = {name: t.to("npu") for name, t in tensors(variant, **{"x": BF16, "weight": BF16, **made}).items()}
    host_npu.calls.clear()
    npu.rms_norm(**given, variant=variant, **options)
    assert sum(host_npu.calls.values()) == launches, host_npu.calls


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("variant", ["llama", "gemma", "gate-first"])
def test_every_eps(host_npu, variant, eps):
    given = tensors(variant)
    if eps == 0.0:
        given["x"] = given["x"][:, :3]  # a row of zeros has no direction then
    assert_right(*both(variant, eps=eps), given, TOLERANCE)


@pytest.mark.parametrize("shape", [(1, WIDTH), (1, 1), (5, 1), (4, 33), (1,) * 7 + (WIDTH,)])
@pytest.mark.parametrize("variant", ["llama", "gemma", "gated-silu"])
def test_every_number_of_tokens_and_width(host_npu, variant, shape):
    assert_right(*both(variant), tensors(variant, gate=VARIANTS[variant].gate is not None, shape=shape), TOLERANCE)
    assert host_npu.calls["npu_rms_norm"] == host_npu.calls["npu_rms_norm_backward"] == 1


@pytest.mark.parametrize("view", [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., :17]])
def test_views_are_not_copied(host_npu, view):
    x, weight = (t.to("npu") for t in tensors(x=BF16, weight=BF16).values())
    x = view(x)
    weight = weight[: x.shape[-1]]
    expected = reference.rms_norm(x.cpu(), weight.cpu())
    host_npu.calls.clear()
    found = npu.rms_norm(x, weight)
    assert host_npu.calls == Counter(npu_rms_norm=1)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        ({"shape": (WIDTH,)}, {}),
        ({"shape": (1,) * 8 + (WIDTH,)}, {}),
        ({"shape": (1,) * 7 + (WIDTH,)}, {"group_size": 16}),
        ({"x": torch.float64, "weight": torch.float64}, {}),
        ({"x": SINGLE, "weight": torch.float64}, {}),
        ({"shape": (0, 4096)}, {}),
        ({"shape": (3, 0, WIDTH)}, {}),
        ({"shape": (0, WIDTH)}, {"group_size": 16}),
    ],
    ids=str,
)
def test_what_is_beyond_the_limits_is_the_reference(host_npu, made, options):
    assert_right(*both(**options), tensors(**made), TOLERANCE)
    assert not host_npu.calls["npu_rms_norm"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"variant": "layer"}, "unknown RMSNorm variant"),
        ({"weight": torch.ones(3)}, "weight must have shape"),
        ({"gate": torch.ones(2, WIDTH)}, "takes no gate"),
        ({"group_size": 7}, "group_size must divide"),
    ],
)
def test_errors_are_those_of_the_reference(host_npu, arguments, why):
    with pytest.raises(ValueError, match=why):
        npu.rms_norm(torch.ones(2, WIDTH, device="npu"), **arguments)


def test_a_gate_and_a_large_x_do_not_overflow_in_float16(host_npu):
    given = {name: (300 * t.float()).to(HALF) for name, t in tensors("gate-first", HALF, HALF, gate=True).items()}
    given["weight"] /= 300
    with torch.no_grad():
        found = npu.rms_norm(**{name: t.to("npu") for name, t in given.items()}, variant="gate-first")
    assert found.isfinite().all()
    torch.testing.assert_close(found.cpu(), reference.rms_norm(**given, variant="gate-first"))


@pytest.mark.parametrize("weight", [SINGLE, BF16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_under_autocast_dtypes_are_those_of_the_reference(host_npu, variant, weight):
    given = {name: t.to("npu") for name, t in tensors(variant, BF16, weight).items()}
    with torch.autocast("npu", BF16):
        found, expected = (module.rms_norm(**given, variant=variant) for module in (npu, reference))
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@in_every_mix
def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(fake_npu, variant, dtypes):
    gate = VARIANTS[variant].gate is not None
    for group_size in (None, 16):
        ours, theirs = (
            outcome(function, tensors(variant, *dtypes, gate), "npu").values
            for function in both(variant, group_size=group_size)
        )
        assert all(value is not None for value in ours.values())
        assert [(v.shape, v.dtype) for v in ours.values()] == [(v.shape, v.dtype) for v in theirs.values()]


@pytest.mark.parametrize("variant", ["llama", "gemma", "gated-silu", "gemma-input-scaled"])
def test_inside_torch_compile_it_is_the_operation(host_npu, variant):
    torch.compiler.reset()
    ours, theirs = both(variant)
    given = tensors(variant, BF16, BF16, gate=VARIANTS[variant].gate is not None)
    host_npu.calls.clear()
    assert_right(torch.compile(ours, backend="aot_eager", fullgraph=True), theirs, given, TOLERANCE)
    assert host_npu.calls["npu_rms_norm"] == host_npu.calls["npu_rms_norm_backward"] == 1


def test_a_second_derivative_is_refused(host_npu):
    given = {name: t.to("npu").requires_grad_() for name, t in tensors().items()}
    with pytest.raises(RuntimeError, match="npu_rms_norm of torch_npu has no second derivative"):
        torch.autograd.grad(npu.rms_norm(**given).sum(), given["x"], create_graph=True)


def added(x, residual, weight, eps=1e-6):
    total = x + residual
    return reference.rms_norm(total, weight, eps), total


def summands(x=SINGLE, residual=None, weight=None, shape=(2, 6, WIDTH)):
    first, second = tensors(x=x, weight=weight or x, shape=shape), tensors(x=residual or x, shape=shape, scale=0.5)
    return {"x": first["x"], "residual": second["x"].flip(-1), "weight": first["weight"]}


@pytest.mark.parametrize("shape", [(2, 6, WIDTH), (1, 33), (WIDTH,), (1,) * 7 + (WIDTH,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_normalised_in_one_launch(host_npu, dtype, shape):
    assert_right(npu.add_rms_norm, added, summands(dtype, shape=shape), TOLERANCE)
    assert host_npu.calls["npu_add_rms_norm"] == host_npu.calls["npu_rms_norm_backward"] == 1
    with torch.no_grad():
        given = {name: t.to("npu") for name, t in summands(dtype, shape=shape).items()}
        host_npu.calls.clear()
        npu.add_rms_norm(**given)
    assert host_npu.calls == Counter(npu_add_rms_norm=1)


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_of_a_sum_may_be_left_unused(host_npu, used):
    assert_right(
        lambda **given: npu.add_rms_norm(**given)[used],
        lambda **given: added(**given)[used] + 0 * given["weight"],
        summands(),
        TOLERANCE,
    )


@pytest.mark.parametrize("wanted", ["x", "residual", "weight"])
def test_frozen_arguments_of_a_sum_have_no_gradient(host_npu, wanted):
    given = {name: t.to("npu").requires_grad_(name == wanted) for name, t in summands().items()}
    npu.add_rms_norm(**given)[0].sum().backward()
    assert [name for name, t in given.items() if t.grad is not None] == [wanted]


@pytest.mark.parametrize(
    "made",
    [
        {"weight": BF16},
        {"x": BF16, "residual": SINGLE},
        {"x": torch.float64},
        {"shape": (0, WIDTH)},
        {"shape": (1,) * 8 + (WIDTH,)},
    ],
    ids=str,
)
def test_sums_beyond_the_limits_are_added_and_normalised(host_npu, made):
    assert_right(npu.add_rms_norm, added, summands(**made), TOLERANCE)
    assert not host_npu.calls["npu_add_rms_norm"]


def test_sums_of_other_shapes_are_refused(host_npu):
    x = torch.ones(2, WIDTH, device="npu")
    with pytest.raises(ValueError, match=r"residual must have the shape of x, \(2, 48\); it has \(48,\)"):
        npu.add_rms_norm(x, x[0], x[0])
    with pytest.raises(ValueError, match="weight must have shape"):
        npu.add_rms_norm(x, x, x)


def test_a_sum_has_no_second_derivative_and_says_so(host_npu):
    given = {name: t.to("npu").requires_grad_() for name, t in summands().items()}
    y, _ = npu.add_rms_norm(**given)
    (grad,) = torch.autograd.grad(y.square().sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_sums(fake_npu, dtype):
    found, expected = (outcome(f, summands(dtype), "npu").values for f in (npu.add_rms_norm, added))
    assert all(value is not None for value in found.values())
    assert [(v.shape, v.dtype) for v in found.values()] == [(v.shape, v.dtype) for v in expected.values()]


def test_a_sum_inside_torch_compile(host_npu):
    torch.compiler.reset()
    compiled = torch.compile(npu.add_rms_norm, backend="aot_eager", fullgraph=True)
    assert_right(compiled, added, summands(BF16), TOLERANCE)
    assert host_npu.calls["npu_add_rms_norm"] == host_npu.calls["npu_rms_norm_backward"] == 1


@pytest.fixture
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": "npu_fused_rmsnorm"})


def test_it_is_what_apply_all_uses_on_an_npu(host_npu, manager):
    model = torch.nn.Sequential(Llama(WIDTH), torch.nn.RMSNorm(WIDTH), torch.nn.LayerNorm(WIDTH)).to("npu")
    x = tensors()["x"].to("npu")
    before = model(x)
    host_npu.calls.clear()
    applied = manager.apply_all(model)
    assert [(e.paths, e.kernel_id, e.variant, e.check) for e in applied.report.fused] == [
        (("0",), "npu_fused_rmsnorm", "llama", "passed"),
        (("1",), "npu_fused_rmsnorm", "torch", "passed"),
    ]
    assert host_npu.calls["npu_rms_norm_backward"]  # it was checked
    host_npu.calls.clear()
    torch.testing.assert_close(model(x), before)
    assert host_npu.calls["npu_rms_norm"] == 2
    applied.undo()
    assert torch.equal(model(x), before)


def test_without_the_operation_it_is_not_available(host_npu, monkeypatch):
    kernel = NpuRMSNormKernel()
    assert kernel.unavailable("npu") is None
    monkeypatch.setattr(NpuRMSNormKernel, "ops", ("npu_rms_norm", "npu_of_tomorrow"))
    assert "has no npu_of_tomorrow" in kernel.unavailable("npu")
