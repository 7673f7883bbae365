"""What is specific to RMSNorm in Triton: one pass, many programs, layouts that are not copied, and what is kept."""

from collections import Counter

import pytest
import torch
from support.norms import BF16, HALF, KINDS, SINGLE, TOLERANCE, WIDTH, both, summands, tensors, viewed
from support.thorough import few_on, first_quick

from fuseplug_rmsnorm import reference
from fuseplug_rmsnorm.backends import triton as kernel
from fuseplug_rmsnorm.backends.triton import launches

ONCE = Counter(forward=1, backward=1)


@pytest.fixture(autouse=True)
def _counted(backend):
    backend.module("rmsnorm")


@pytest.mark.parametrize("group_size", first_quick([None, 16, WIDTH]))
@pytest.mark.parametrize("variant", first_quick(["gated-silu", *KINDS[:4]]))
def test_more_rows_than_programs(backend, variant, group_size):
    functions = both(kernel, variant, group_size=group_size)
    backend.assert_right(*functions, tensors(variant, shape=(2, 150, WIDTH)), TOLERANCE)
    assert backend.launches == ONCE


def test_more_programs_than_are_added_up_at_once(backend, monkeypatch):
    monkeypatch.setattr(launches, "_processors", lambda _: 132)
    monkeypatch.setattr(launches, "_PARTS", 4)
    backend.assert_right(*both(kernel), tensors(shape=(40, 1024)), TOLERANCE)


@pytest.mark.parametrize("shape", few_on("triton", [(3, 3000), (1, 16384)]), ids=str)
def test_wide_rows(backend, shape):
    backend.assert_right(*both(kernel, "gated-silu"), tensors("gated-silu", shape=shape), TOLERANCE)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[..., :17],
        lambda x: x.flatten(0, 1)[::2],
        lambda x: x[:1, :1].expand(3, 1, WIDTH),
        lambda x: x[1, 2],
    ],
)
def test_rows_a_stride_apart_are_not_copied(backend, monkeypatch, view):
    arguments = backend.on(tensors("gated-silu"))
    x, gate = (view(arguments[name]).requires_grad_() for name in ("x", "gate"))
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    y = kernel.rms_norm(x, arguments["weight"][: x.shape[-1]], variant="gated-silu", gate=gate)
    torch.autograd.grad(y, (x, gate), torch.ones_like(y))
    assert backend.launches == ONCE


def test_the_result_lies_as_x_does(backend):
    x = torch.randn(2, 3, 4, WIDTH).to(backend.device).transpose(1, 2)
    assert kernel.rms_norm(x).stride() == x.stride()
    assert kernel.rms_norm(x[..., ::2]).stride(-1) == 1
    channels_first = x.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
    for y in (kernel.rms_norm(channels_first), *kernel.add_rms_norm(channels_first, x)):
        assert y.stride() == channels_first.stride()
    functions = (kernel.rms_norm, reference.rms_norm)
    ours, theirs = (torch.autograd.grad(f(channels_first).square().sum(), channels_first) for f in functions)
    torch.testing.assert_close(ours, theirs)


def test_nothing_is_kept_but_the_inputs_and_one_number_for_each_row(backend):
    arguments = backend.on(tensors("gated-silu", BF16, BF16), "x", "weight", "gate")
    y = kernel.rms_norm(**arguments, variant="gated-silu", group_size=16)
    rstd, *kept = y.grad_fn.saved_tensors
    assert [t is arguments[name] for name, t in zip(("x", "weight", "gate"), kept, strict=True)] == [True] * 3
    assert (rstd.shape, rstd.dtype) == ((2, 6, 3), SINGLE)


@pytest.mark.parametrize("narrowest", [0, WIDTH])
def test_hooks_may_give_what_is_kept_another_layout(backend, narrowest):
    def packed(t):
        return t.contiguous() if t.shape[-1] >= narrowest else t

    def hooked(function):
        def run(**arguments):
            with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
                return function(**arguments)

        return run

    functions = viewed(lambda x: x.transpose(0, 1), *map(hooked, both(kernel, "gated-silu", group_size=16)))
    backend.assert_right(*functions, tensors("gated-silu"), TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"x": torch.float64, "weight": torch.float64}, {}),
        ({"x": SINGLE, "weight": torch.float64}, {}),
        ({"shape": (3, 0, WIDTH)}, {}),
        ({"shape": (1, launches.WIDEST + 1)}, {}),
        ({"shape": (1, 1 << 16)}, {"group_size": 1}),
    ],
    ids=str,
)
def test_beyond_the_limits_it_is_the_reference(backend, changes, options):
    arguments = backend.on(tensors(**changes))
    assert torch.equal(kernel.rms_norm(**arguments, **options), reference.rms_norm(**arguments, **options))
    assert not backend.launches


def test_within_the_limits_it_is_not(backend):
    kernel.rms_norm(torch.ones(1, launches.WIDEST * 2, device=backend.device), group_size=launches.WIDEST)
    assert backend.launches == Counter(forward=1)


def test_the_gradients_of_several_results_of_vmap_are_the_reference_s(backend):
    arguments = backend.on(tensors(), "x", "weight")
    y = kernel.rms_norm(**arguments)
    rows = torch.ones(4, *y.shape, device=backend.device)
    gradients = torch.func.vmap(lambda grad: torch.autograd.grad(y, arguments["x"], grad, retain_graph=True)[0])(rows)
    (expected,) = torch.autograd.grad(reference.rms_norm(**arguments), arguments["x"], rows[0])
    torch.testing.assert_close(gradients, expected.expand_as(gradients))
    assert backend.launches == Counter(forward=1)


def test_compile_once_for_all_numbers_of_tokens(backend):
    torch.compiler.reset()
    weight = torch.ones(WIDTH, device=backend.device)
    graphs = []

    def keeping(graph, _):
        graphs.append(graph)
        return graph

    norm = torch.compile(kernel.rms_norm, backend=keeping, fullgraph=True, dynamic=True)
    for tokens in (3, 4, 7):
        x = torch.randn(tokens, 2, WIDTH, device=backend.device)
        torch.testing.assert_close(norm(x, weight), reference.rms_norm(x, weight))
    assert len(graphs) == 1
    assert backend.launches == Counter(forward=3)


def test_export_the_operation(backend):
    class Module(torch.nn.Module):
        def forward(self, x, weight):
            return kernel.rms_norm(x, weight)

    x, weight = backend.on(tensors()).values()
    program = torch.export.export(Module(), (x, weight), dynamic_shapes=({1: torch.export.Dim("tokens", min=2)}, {}))
    assert "fuseplug_rmsnorm.rms_norm.default" in str(program.graph)
    x = torch.randn(2, 9, WIDTH, device=backend.device)
    torch.testing.assert_close(program.module()(x, weight), reference.rms_norm(x, weight))


def test_the_operations_pass_the_checks_of_torch(backend):
    x, weight, gate = backend.on(tensors("gated-silu")).values()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(launches.forward.op, (x, x, weight, gate, 1e-6, "gated-silu", 16, True), test_utils=checks)
    rstd = torch.ones(2, 6, 3, device=backend.device)
    arguments = (x, x, x.transpose(0, 1).transpose(0, 1), weight, gate, rstd, "gated-silu", 16, (True, True, True))
    torch.library.opcheck(launches.backward.op, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)  # the interpreter rounds to bfloat16 towards zero
def test_a_sum_is_normalised_as_it_is_rounded_in_one_pass(backend, dtype):
    arguments = backend.on(summands(dtype))
    y, total = kernel.add_rms_norm(**arguments)
    assert backend.launches == Counter(forward=1)
    assert torch.equal(total, arguments["x"] + arguments["residual"])
    assert torch.equal(y, kernel.rms_norm(total, arguments["weight"]))


@pytest.mark.parametrize(
    ("changes", "count"),
    [({"x": BF16, "residual": SINGLE}, 1), ({"x": torch.float64}, 0), ({"shape": (1, launches.WIDEST + 1)}, 0)],
    ids=str,
)
def test_beyond_the_limits_a_sum_is_an_addition_and_a_norm(backend, changes, count):
    kernel.add_rms_norm(**backend.on(summands(**changes)))
    assert backend.launches["forward"] == count
