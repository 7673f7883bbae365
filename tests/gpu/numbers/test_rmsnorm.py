"""RMSNorm by Triton: right in every variant, in one pass, and really by the kernel."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter

import pytest
import torch
from support.judging import outcome
from support.thorough import covering
from torch._subclasses import FakeTensorMode

import fuseplug_rmsnorm
from fuseplug import KernelManager
from fuseplug_rmsnorm import functional, reference
from fuseplug_rmsnorm.backends import inductor
from fuseplug_rmsnorm.backends import triton as kernel
from fuseplug_rmsnorm.backends.triton import launches
from fuseplug_rmsnorm.reference import VARIANTS
from fuseplug_rmsnorm.specimens import CastLast, GatedSilu, GateFirst, Llama
from fuseplug_verify import Tolerance, excess

WIDTH = 48
TOLERANCE = Tolerance(roundings=4.0, working_roundings=20.0)
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BF16, SINGLE)
PAIRS = [*itertools.product(DTYPES, DTYPES), *((dtype, None) for dtype in DTYPES)]
KINDS = ["llama", "gemma", "gemma-input-scaled", "gate-first", "gated-silu", "gated-sigmoid-cast-last"]
"""Of what the programs do, one variant each."""

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Counts the launches, by the name of the operation."""
    found = Counter()

    def counting(name, launch):
        def run(*arguments):
            found[name] += 1
            launch(*arguments)

        return run

    for name in ("forward", "backward"):
        operation = getattr(launches, name)
        monkeypatch.setattr(operation, "launch", counting(name, operation.launch))
    return found


SOME = [each for n in (1, 2, 3) for each in itertools.combinations(("x", "weight", "gate"), n)]
ONCE = Counter(forward=1, backward=1)


def tensors(variant="llama", x=SINGLE, weight=SINGLE, gate=None, shape=(2, 6, WIDTH), scale=1.0):
    """Rows of several magnitudes, one of them zero; weights around one and around zero."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = 1.0
    if len(shape) > 1:
        magnitudes = torch.tensor((1.0, 1e-3, 16.0, 3e-4, 0.0, 1.0)).repeat(-(-shape[-2] // 6))[: shape[-2], None]
    found = {"x": (scale * magnitudes * torch.randn(shape, generator=generator)).to(x)}
    if weight is not None:
        found["weight"] = (0.3 * torch.randn(shape[-1:], generator=generator) + torch.arange(shape[-1]) % 2).to(weight)
    if VARIANTS[variant].gate if gate is None else gate:
        found["gate"] = (3 * torch.randn(shape, generator=generator)).to(x)
    return found


def both(variant="llama", **options):
    def called(function):
        return lambda **tensors: function(**tensors, variant=variant, **options)

    return called(kernel.rms_norm), called(reference.rms_norm)


@pytest.fixture
def assert_right(device):
    def check(ours, theirs, given, tolerance=TOLERANCE):
        found = outcome(ours, given, device)
        missing = [name for name, value in found.values.items() if value is None]
        assert not missing, f"no {', '.join(missing)}"
        expected, truth = outcome(theirs, given), outcome(theirs, given, dtype=torch.float64)
        why = excess(found, expected, truth, tolerance)
        assert not why, why

    return check


def on(device, given, **changes):
    return {name: t.to(device) for name, t in {**given, **changes}.items()}


in_every_mix = pytest.mark.parametrize(("variant", "dtypes"), covering(itertools.product(VARIANTS, PAIRS)), ids=str)


class TestValuesAndGradients:
    @in_every_mix
    def test_of_every_variant_in_every_mix_of_dtypes(self, assert_right, launched, variant, dtypes):
        gates = (False, True) if VARIANTS[variant].gate else (False,)
        for gate, group_size in itertools.product(gates, (None, 16)):
            launched.clear()
            assert_right(*both(variant, group_size=group_size), tensors(variant, *dtypes, gate))
            assert launched == ONCE

    @pytest.mark.parametrize("group_size", [None, 16, WIDTH])
    @pytest.mark.parametrize("variant", KINDS)
    def test_of_more_rows_than_programs(self, assert_right, variant, group_size):
        assert_right(*both(variant, group_size=group_size), tensors(variant, shape=(2, 150, WIDTH)))

    def test_of_more_programs_than_are_added_up_at_once(self, assert_right, monkeypatch):
        monkeypatch.setattr(launches, "_processors", lambda _: 132)
        assert_right(*both(), tensors(shape=(70, 2048)))

    @pytest.mark.parametrize(
        "shape", [(1, WIDTH), (1, 1), (5, 1), (WIDTH,), (4, 33), (7, 129), (3, 3000), (1, 2, 1, 3, 40), (1, 16384)]
    )
    @pytest.mark.parametrize("variant", ["gemma", "gated-silu"])
    def test_of_every_number_of_tokens_and_width(self, assert_right, launched, variant, shape):
        assert_right(*both(variant), tensors(variant, shape=shape))
        assert launched == ONCE

    @pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-2])
    @pytest.mark.parametrize("variant", ["llama", "gate-first"])
    def test_with_every_eps(self, assert_right, variant, eps):
        given = tensors(variant)
        if eps == 0.0:
            given["x"] = given["x"][:, :3]  # a row of zeros has no direction then
            given |= {"gate": given["gate"][:, :3]} if "gate" in given else {}
        assert_right(*both(variant, eps=eps), given)

    def test_of_a_row_of_zeros_without_eps_are_nan_in_that_row_alone(self, device):
        x = torch.ones(3, WIDTH, device=device)
        x[1] = 0
        assert kernel.rms_norm(x, None, 0.0).isnan().any(-1).tolist() == [False, True, False]

    def test_do_not_overflow_in_float16(self, device):
        given = {name: (300 * t.float()).to(HALF) for name, t in tensors("gate-first", HALF, HALF).items()}
        given["weight"] /= 300
        found = kernel.rms_norm(**on(device, given), variant="gate-first")
        assert found.isfinite().all()
        torch.testing.assert_close(found.cpu(), reference.rms_norm(**given, variant="gate-first"))

    def test_of_a_gate_in_another_dtype(self, assert_right, launched):
        given = tensors("gated-silu", BF16, BF16)
        assert_right(*both("gated-silu"), {**given, "gate": given["gate"].float()})
        assert launched == ONCE

    @pytest.mark.parametrize("value", [-300.0, 300.0])
    @pytest.mark.parametrize("variant", ["gated-silu", "gated-sigmoid"])
    def test_of_a_gate_far_from_zero(self, assert_right, variant, value):
        given = tensors(variant)
        assert_right(*both(variant), {**given, "gate": torch.full_like(given["gate"], value)})

    def test_are_the_same_bits_each_time(self, device):
        given = on(device, tensors("gated-silu", shape=(300, WIDTH)))
        first, second = (outcome(both("gated-silu")[0], given, device).values for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_leave_the_arguments_alone(self, device):
        given = on(device, tensors("gated-silu"))
        before = {name: t.clone() for name, t in given.items()}
        leaves = {name: t.requires_grad_() for name, t in given.items()}
        kernel.rms_norm(**leaves, variant="gated-silu").sum().backward()
        assert all(torch.equal(given[name], before[name]) for name in given)


SERVED = {
    "heads before tokens": lambda x: x.transpose(0, 1),
    "part of each row": lambda x: x[..., :17],
    "part of each row, not aligned": lambda x: x[..., 3:40],
    "every other row": lambda x: x.flatten(0, 1)[::2],
    "the same row again and again": lambda x: x[:1, :1].expand(3, 1, WIDTH),
    "overlapping rows": lambda x: x.flatten().unfold(0, 20, 1),
    "one row": lambda x: x[1, 2],
}
COPIED = {
    "every other row of some": lambda x: x[:, ::4],
    "every other element": lambda x: x[..., ::2],
    "columns for rows": lambda x: x.transpose(-1, -2),
    "rows broadcast": lambda x: x[:, :1].expand(2, 6, WIDTH),
}


class TestLayouts:
    @pytest.mark.parametrize("view", SERVED)
    def test_of_rows_a_stride_apart_is_not_copied(self, device, launched, monkeypatch, view):
        given = on(device, tensors("gated-silu"))
        x, gate = (SERVED[view](given[name]).requires_grad_() for name in ("x", "gate"))
        weight = given["weight"][: x.shape[-1]]
        monkeypatch.setattr(torch.Tensor, "copy_", None)
        found = kernel.rms_norm(x, weight, variant="gated-silu", gate=gate)
        torch.autograd.grad(found, (x, gate), torch.ones_like(found))
        assert launched == ONCE

    @pytest.mark.parametrize("view", {**SERVED, **COPIED})
    @pytest.mark.parametrize("variant", ["gemma", "gated-silu", "gate-first"])
    def test_of_every_layout(self, assert_right, launched, variant, view):
        ours, theirs = both(variant)
        see = {**SERVED, **COPIED}[view]

        def seeing(function):
            def run(x, weight, gate=None):
                x = see(x)
                gates = {} if gate is None else {"gate": see(gate)}
                return function(x=x, weight=weight[: x.shape[-1]], **gates)

            return run

        assert_right(seeing(ours), seeing(theirs), tensors(variant))
        assert launched == ONCE

    def test_of_x_and_gate_in_different_layouts(self, assert_right):
        def seeing(function):
            return lambda x, weight, gate: function(x=x.transpose(0, 1), weight=weight, gate=gate.view(6, 2, WIDTH))

        assert_right(*map(seeing, both("gated-silu")), tensors("gated-silu"))

    def test_of_x_and_gate_at_different_strides(self, assert_right):
        def seeing(function):
            return lambda x, weight, gate: function(x=x, weight=weight, gate=torch.cat((gate, x), -1)[..., :WIDTH])

        assert_right(*map(seeing, both("gated-silu")), tensors("gated-silu"))

    @pytest.mark.parametrize("wanted", [("x",), ("weight",), ("gate",)])
    def test_gradients_come_in_any_layout(self, device, wanted):
        given = {n: t.requires_grad_(n in wanted) for n, t in on(device, tensors("gated-silu")).items()}
        upstream = torch.randn(6, 2, WIDTH, generator=torch.Generator().manual_seed(0)).to(device).transpose(0, 1)
        for see in (lambda x: x, lambda x: x.transpose(0, 1)):
            for grad in (see(upstream), torch.ones(1, device=device).expand(see(given["x"]).shape)):
                found, expected = (
                    torch.autograd.grad(
                        module.rms_norm(
                            see(given["x"]), given["weight"], variant="gated-silu", gate=see(given["gate"])
                        ),
                        given[wanted[0]],
                        grad,
                    )
                    for module in (kernel, reference)
                )
                # A GPU adds up in another order.
                allowed = {} if device == "cpu" else {"rtol": 1e-5, "atol": 1e-5}
                torch.testing.assert_close(found, expected, **allowed)

    def test_a_weight_with_gaps(self, assert_right):
        def seeing(function):
            return lambda x, weight: function(x=x[..., : WIDTH // 2], weight=weight[::2])

        assert_right(*map(seeing, both("gemma")), tensors("gemma"))

    def test_the_result_lies_as_x_does(self, device):
        x = torch.randn(2, 3, 4, WIDTH, device=device).transpose(1, 2)
        assert kernel.rms_norm(x).stride() == x.stride()
        assert kernel.rms_norm(x[..., ::2]).stride(-1) == 1


class TestGradients:
    @pytest.mark.parametrize("wanted", SOME)
    @pytest.mark.parametrize("variant", ["gated-silu", "gate-first", "gemma-input-scaled"])
    def test_only_those_wanted_are_computed(self, device, monkeypatch, variant, wanted):
        given = on(device, tensors(variant, shape=(300, WIDTH)))
        wanted = [name for name in wanted if name in given] or ["x"]
        for name in wanted:
            given[name].requires_grad_()
        made = []
        launch = launches.backward.launch
        monkeypatch.setattr(
            launches.backward, "launch", lambda results, *rest: (made.append(len(results)), launch(results, *rest))
        )
        y = kernel.rms_norm(**given, variant=variant)
        expected = reference.rms_norm(**given, variant=variant)
        upstream = torch.randn_like(y)
        leaves = [given[name] for name in wanted]
        found, right = (torch.autograd.grad(out, leaves, upstream) for out in (y, expected))
        assert made == [len(wanted)]
        for one, other in zip(found, right, strict=True):
            # A row near zero has gradients of thousands: what cancels in them is rounded at their size.
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 + 1e-6 * other.abs().max().item())

    def test_nothing_is_kept_but_the_inputs_and_one_number_for_each_row(self, device):
        given = {name: t.requires_grad_() for name, t in on(device, tensors("gated-silu", BF16, BF16)).items()}
        y = kernel.rms_norm(**given, variant="gated-silu", group_size=16)
        rstd, *kept = y.grad_fn.saved_tensors
        assert [t is given[name] for name, t in zip(("x", "weight", "gate"), kept, strict=True)] == [True] * 3
        assert (rstd.shape, rstd.dtype) == ((2, 6, 3), SINGLE)

    @pytest.mark.parametrize("narrowest", [0, WIDTH])
    def test_hooks_may_give_what_is_kept_another_layout(self, assert_right, narrowest):
        def packed(t):
            return t.contiguous() if t.shape[-1] >= narrowest else t

        def seeing(function):
            def run(x, weight, gate):
                with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
                    return function(x=x.transpose(0, 1), weight=weight, gate=gate.transpose(0, 1))

            return run

        assert_right(*map(seeing, both("gated-silu", group_size=16)), tensors("gated-silu"))

    def test_without_any_nothing_is_kept(self, device, launched):
        given = on(device, tensors())
        for needs in (False, True):
            given["x"].requires_grad_(needs)
            with torch.inference_mode(needs):
                assert not kernel.rms_norm(**given).requires_grad
        assert launched == Counter(forward=2)

    @pytest.mark.parametrize("variant", KINDS)
    def test_can_be_differentiated_again(self, device, launched, variant):
        given = {name: t.requires_grad_() for name, t in on(device, tensors(variant, shape=(3, 8))).items()}
        given["x"] = torch.randn(3, 8, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()

        def twice(function, tensors):
            first = torch.autograd.grad(
                function(**tensors, variant=variant).square().sum(), list(tensors.values()), create_graph=True
            )
            return torch.autograd.grad(sum(g.square().sum() for g in first), list(tensors.values()))

        expected = twice(reference.rms_norm, {n: t.detach().double().requires_grad_() for n, t in given.items()})
        torch.testing.assert_close(
            twice(kernel.rms_norm, given), tuple(t.float() for t in expected), rtol=1e-3, atol=1e-3
        )
        assert launched == ONCE  # the gradient of y is what y's own backward is given


class TestWhatIsTheReference:
    @pytest.mark.parametrize(
        ("made", "options"),
        [
            ({"x": torch.float64, "weight": torch.float64}, {}),
            ({"x": SINGLE, "weight": torch.float64}, {}),
            ({"shape": (0, WIDTH)}, {}),
            ({"shape": (3, 0, WIDTH)}, {}),
            ({"shape": (1, launches.WIDEST + 1)}, {}),
            ({"shape": (1, 1 << 16)}, {"group_size": 1}),
        ],
        ids=str,
    )
    def test_beyond_the_limits(self, assert_right, launched, made, options):
        assert_right(*both(**options), tensors(**made))
        assert not launched

    def test_within_the_limits_it_is_not(self, device, launched):
        kernel.rms_norm(torch.ones(1, launches.WIDEST * 2, device=device), group_size=launches.WIDEST)
        assert launched == Counter(forward=1)

    def test_to_transforms_and_tracers(self, device, launched):
        given = on(device, tensors())
        x, weight = given["x"], given["weight"]

        def norm(x):
            return kernel.rms_norm(x, weight)

        torch.testing.assert_close(torch.func.vmap(norm)(x), reference.rms_norm(x, weight))
        expected = torch.func.grad(lambda x: reference.rms_norm(x, weight).sum())(x)
        torch.testing.assert_close(torch.func.grad(lambda x: norm(x).sum())(x), expected)
        found, expected = (
            torch.func.jvp(lambda x, f=f: f(x, weight), (x,), (x,)) for f in (kernel.rms_norm, reference.rms_norm)
        )
        torch.testing.assert_close(found, expected)
        assert "rsqrt" in str(torch.jit.trace(norm, (x,), check_trace=False).graph)
        assert not launched

    def test_to_gradients_that_are_no_plain_tensors(self, device, launched):
        given = {name: t.requires_grad_() for name, t in on(device, tensors()).items()}
        y = kernel.rms_norm(**given)
        rows = torch.ones(4, *y.shape, device=device)
        found = torch.func.vmap(lambda grad: torch.autograd.grad(y, given["x"], grad, retain_graph=True)[0])(rows)
        (expected,) = torch.autograd.grad(reference.rms_norm(**given), given["x"], rows[0])
        torch.testing.assert_close(found, expected.expand_as(found))
        assert launched == Counter(forward=1)

    @pytest.mark.parametrize("weight", [SINGLE, BF16], ids=str)
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_where_autocast_changes_the_variant(self, device, launched, variant, weight):
        given = on(device, tensors(variant, BF16, weight))
        with torch.autocast(device, BF16):
            found, expected = (module.rms_norm(**given, variant=variant) for module in (kernel, reference))
            cast = VARIANTS[variant].is_cast(given["x"])
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        assert launched == Counter(forward=0 if cast else 1) - Counter()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"variant": "layer"}, "unknown RMSNorm variant"),
        ({"weight": torch.ones(3)}, "weight must have shape"),
        ({"gate": torch.ones(2, WIDTH)}, "takes no gate"),
        ({"group_size": 7}, "group_size must divide"),
    ],
)
def test_errors_are_those_of_the_reference(device, arguments, why):
    with pytest.raises(ValueError, match=why):
        kernel.rms_norm(torch.ones(2, WIDTH, device=device), **arguments)


class TestCompilersAndExporters:
    @pytest.mark.parametrize("variant", KINDS)
    def test_compile_one_graph(self, assert_right, launched, variant):
        torch.compiler.reset()
        ours, theirs = both(variant, group_size=16)
        assert_right(torch.compile(ours, backend="aot_eager", fullgraph=True), theirs, tensors(variant, BF16, BF16))
        assert launched == ONCE

    def test_compile_once_for_all_numbers_of_tokens(self, device, launched):
        torch.compiler.reset()
        weight = torch.ones(WIDTH, device=device)
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph

        norm = torch.compile(kernel.rms_norm, backend=backend, fullgraph=True, dynamic=True)
        for tokens in (3, 4, 7):
            x = torch.randn(tokens, 2, WIDTH, device=device)
            torch.testing.assert_close(norm(x, weight), reference.rms_norm(x, weight))
        assert len(graphs) == 1
        assert launched == Counter(forward=3)

    def test_export_the_operation(self, device, launched):
        class Module(torch.nn.Module):
            def forward(self, x, weight):
                return kernel.rms_norm(x, weight)

        given = tuple(on(device, tensors()).values())
        tokens = torch.export.Dim("tokens", min=2)
        program = torch.export.export(Module(), given, dynamic_shapes=({1: tokens}, {}))
        assert "fuseplug_rmsnorm.rms_norm.default" in str(program.graph)
        launched.clear()
        x = torch.randn(2, 9, WIDTH, device=device)
        torch.testing.assert_close(program.module()(x, given[1]), reference.rms_norm(x, given[1]))
        assert launched == Counter(forward=1)

    @in_every_mix
    def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(self, device, launched, variant, dtypes):
        with FakeTensorMode(allow_non_fake_inputs=True):
            for group_size in (None, 16):
                given = {name: torch.empty_like(t, device=device) for name, t in tensors(variant, *dtypes).items()}
                ours, theirs = (shapes(f, given) for f in both(variant, group_size=group_size))
                assert ours == theirs
        assert not launched

    def test_the_operations_pass_the_checks_of_torch(self, device):
        given = on(device, tensors("gated-silu"))
        x, weight, gate = given["x"], given["weight"], given["gate"]
        torch.library.opcheck(launches.forward.op, (x, x, weight, gate, 1e-6, "gated-silu", 16, True))
        rstd = torch.ones(2, 6, 3, device=device)
        arguments = (x, x, x.transpose(0, 1).transpose(0, 1), weight, gate, rstd, "gated-silu", 16, (True, True, True))
        torch.library.opcheck(launches.backward.op, arguments)


def shapes(function, given):
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    results = function(**leaves)
    results = results if isinstance(results, tuple) else (results,)
    found = torch.autograd.grad(results, list(leaves.values()), [torch.empty_like(y) for y in results])
    return [(t.shape, t.dtype) for t in (*results, *found)]


def summands(x=SINGLE, residual=None, weight=None, shape=(2, 6, WIDTH)):
    first, second = tensors(x=x, weight=weight or x, shape=shape), tensors(x=residual or x, shape=shape, scale=0.5)
    return {"x": first["x"], "residual": second["x"].flip(-1), "weight": first["weight"]}


def sums(variant="llama"):
    def called(function):
        return lambda **tensors: function(**tensors, variant=variant)

    return called(kernel.add_rms_norm), called(reference.add_rms_norm)


class TestTheNormOfASum:
    @pytest.fixture(params=[name for name, how in VARIANTS.items() if how.gate is None])
    def variant(self, request):
        return request.param

    @pytest.mark.parametrize("dtypes", [(HALF, HALF), (BF16, BF16), (SINGLE, SINGLE), (HALF, SINGLE)], ids=str)
    def test_is_one_pass_in_every_variant(self, assert_right, launched, dtypes, variant):
        assert_right(*sums(variant), summands(dtypes[0], weight=dtypes[1]))
        assert launched == ONCE

    @pytest.mark.parametrize("shape", [(1, 33), (WIDTH,), (300, 40), (2, 3, 4, 5)], ids=str)
    def test_of_every_shape(self, assert_right, launched, shape):
        assert_right(*sums(), summands(shape=shape))
        assert launched == ONCE

    @pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)  # the interpreter rounds to bfloat16 towards zero
    def test_normalises_the_sum_as_it_is_rounded(self, device, dtype):
        given = on(device, summands(dtype))
        y, total = kernel.add_rms_norm(**given)
        assert torch.equal(total, given["x"] + given["residual"])
        assert torch.equal(y, kernel.rms_norm(total, given["weight"]))

    def test_in_different_layouts(self, assert_right):
        def seeing(function):
            return lambda x, residual, weight: function(
                x=x.transpose(0, 1), residual=residual.view(6, 2, WIDTH), weight=weight
            )

        assert_right(*map(seeing, sums()), summands())

    def test_at_different_strides(self, assert_right):
        def seeing(function):
            return lambda x, residual, weight: function(
                x=x, residual=torch.cat((residual, x), -1)[..., :WIDTH], weight=weight
            )

        assert_right(*map(seeing, sums()), summands())

    @pytest.mark.parametrize("used", [0, 1])
    def test_either_result_may_be_left_unused(self, assert_right, used):
        assert_right(
            lambda **given: kernel.add_rms_norm(**given)[used] + 0 * given["weight"],
            lambda **given: reference.add_rms_norm(**given)[used] + 0 * given["weight"],
            summands(),
        )

    @pytest.mark.parametrize("wanted", ["x", "residual", "weight"])
    def test_frozen_arguments_have_no_gradient(self, device, wanted):
        given = {name: t.requires_grad_(name == wanted) for name, t in on(device, summands()).items()}
        sum(kernel.add_rms_norm(**given)).sum().backward()
        assert [name for name, t in given.items() if t.grad is not None] == [wanted]

    def test_x_may_be_its_own_residual(self, device):
        x = torch.randn(3, WIDTH, device=device, requires_grad=True)
        found, expected = (torch.autograd.grad(sum(m.add_rms_norm(x, x)).sum(), x) for m in (kernel, reference))
        torch.testing.assert_close(found, expected)

    def test_gradients_can_be_added_to(self, device):
        given = {name: t.requires_grad_() for name, t in on(device, summands()).items()}
        for _ in range(2):
            kernel.add_rms_norm(**given)[0].square().sum().backward()
        assert given["x"].grad.data_ptr() != given["residual"].grad.data_ptr()
        assert torch.equal(given["x"].grad, given["residual"].grad)

    @pytest.mark.parametrize("used", [0, 1])
    def test_can_be_differentiated_again(self, device, used):
        def twice(module, dtype):
            given = summands(shape=(3, 8)) | {"x": torch.linspace(-1, 1, 24).view(3, 8)}
            given = {name: t.to(dtype).requires_grad_() for name, t in on(device, given).items()}
            y, total = module.add_rms_norm(**given)
            loss = (y.pow(3) + used * total.pow(3)).sum()
            first = torch.autograd.grad(loss, list(given.values()), create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), list(given.values()))

        expected = tuple(t.float() for t in twice(reference, torch.float64))
        torch.testing.assert_close(twice(kernel, SINGLE), expected, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize(
        ("made", "count"),
        [
            ({"x": BF16, "residual": SINGLE}, 1),
            ({"x": torch.float64}, 0),
            ({"shape": (0, WIDTH)}, 0),
            ({"shape": (1, launches.WIDEST + 1)}, 0),
        ],
        ids=str,
    )
    def test_beyond_the_limits_it_is_an_addition_and_a_norm(self, assert_right, launched, made, count):
        assert_right(*sums(), summands(**made))
        assert launched["forward"] == count

    def test_under_autocast_dtypes_are_those_of_the_reference(self, device, variant):
        given = on(device, summands(BF16))
        with torch.autocast(device, BF16):
            found, expected = (m.add_rms_norm(**given, variant=variant) for m in (kernel, reference))
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)

    def test_other_shapes_are_refused(self, device):
        x = torch.ones(2, WIDTH, device=device)
        with pytest.raises(ValueError, match=r"residual must have the shape of x, \(2, 48\); it has \(48,\)"):
            kernel.add_rms_norm(x, x[0], x[0])
        with pytest.raises(ValueError, match="weight must have shape"):
            kernel.add_rms_norm(x, x, x)

    def test_compiles_as_one_graph(self, assert_right, launched):
        torch.compiler.reset()
        ours, theirs = sums()
        assert_right(torch.compile(ours, backend="aot_eager", fullgraph=True), theirs, summands(BF16))
        assert launched == ONCE

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_of_fake_tensors(self, device, launched, dtype):
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = {name: torch.empty_like(t, device=device) for name, t in summands(dtype).items()}
            ours, theirs = (shapes(f, given) for f in sums())
        assert ours == theirs
        assert not launched


class TestTheFunctionalDoor:
    def test_is_the_kernel_where_there_is_a_device_for_it(self, device, launched):
        x = torch.ones(2, WIDTH, device=device)
        fuseplug_rmsnorm.rms_norm(x)
        fuseplug_rmsnorm.add_rms_norm(x, x)
        assert launched == Counter(forward=2)

    def test_is_the_addition_and_the_norm_where_nothing_fuses_them(self, monkeypatch):
        monkeypatch.setattr("fuseplug_backends.functional.module_for", lambda *_: inductor)
        given = summands()
        found, expected = (f(**given, variant="gemma") for f in (functional.add_rms_norm, reference.add_rms_norm))
        assert all(map(torch.equal, found, expected))

    def test_compiles_as_one_graph(self, device, launched):
        def block(x, residual, weight):
            y, total = fuseplug_rmsnorm.add_rms_norm(x, residual, weight)
            return fuseplug_rmsnorm.rms_norm(y, weight, variant="gemma") + total

        torch.compiler.reset()
        given = on(device, summands())
        found = torch.compile(block, backend="aot_eager", fullgraph=True)(**given)
        torch.testing.assert_close(found, block(**given))
        assert launched == Counter(forward=4)


class TestApplying:
    @pytest.fixture
    def manager(self):
        return KernelManager(environ={"FUSEPLUG_KERNELS": "triton_fused_rmsnorm,inductor_fused_rmsnorm"})

    def test_it_is_what_apply_all_uses(self, device, manager, launched):
        model = torch.nn.Sequential(Llama(WIDTH), torch.nn.RMSNorm(WIDTH), CastLast(31), torch.nn.LayerNorm(WIDTH))
        model.to(device)
        x, narrow = (torch.randn(2, 5, width, device=device) for width in (WIDTH, 31))
        before = model[:2](x), model[2](narrow)
        applied = manager.apply_all(model)
        assert [(e.paths, e.kernel_id, e.variant, e.check) for e in applied.report.fused] == [
            (("0",), "triton_fused_rmsnorm", "llama", "passed"),
            (("1",), "triton_fused_rmsnorm", "torch", "passed"),
            (("2",), "triton_fused_rmsnorm", "cast-last", "passed"),
        ]
        assert launched["backward"]  # it was checked
        launched.clear()
        torch.testing.assert_close((model[:2](x), model[2](narrow)), before)
        assert launched == Counter(forward=3)
        applied.undo()
        assert all(map(torch.equal, (model[:2](x), model[2](narrow)), before))

    @pytest.mark.parametrize("norm", [GateFirst, GatedSilu])
    def test_to_gated_norms(self, device, manager, launched, norm):
        model = norm().to(device)
        x, gate = torch.randn(2, 3, 5, 48, device=device)
        before = model(x, gate)
        (entry,) = manager.apply_all(model).report.fused
        assert (entry.kernel_id, entry.check) == ("triton_fused_rmsnorm", "passed")
        launched.clear()
        torch.testing.assert_close(model(x, gate), before)
        assert launched == Counter(forward=1)

    @pytest.mark.parametrize(
        ("model", "name", "variant"),
        [
            ("llama", "LlamaRMSNorm", "llama"),
            ("gemma3", "Gemma3RMSNorm", "gemma"),
        ],
    )
    def test_to_those_of_transformers_in_bfloat16(self, device, manager, launched, model, name, variant):
        pytest.importorskip("transformers")
        modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        norm = getattr(modeling, name)(64).to(device, BF16)
        x = torch.randn(2, 5, 64, device=device).to(BF16)
        before = norm(x)
        applied = manager.apply_all(norm)
        assert [(e.kernel_id, e.variant, e.check) for e in applied.report.fused] == [
            ("triton_fused_rmsnorm", variant, "passed")
        ]
        launched.clear()
        torch.testing.assert_close(norm(x), before, rtol=2**-6, atol=2**-6)
        assert launched == Counter(forward=1)
        applied.undo()
        assert torch.equal(norm(x), before)
