"""RMSNorm on each backend: values and gradients, layouts, dtypes, and the calls left to the reference."""

import itertools

import pytest
import torch
from support import backends
from support.judging import outcome
from support.norms import BF16, DTYPES, HALF, KINDS, PAIRS, SINGLE, TOLERANCE, WIDTH, both, summands, tensors, viewed
from support.thorough import covering, few_on
from support.transforms import TRANSFORMS
from torch.utils.checkpoint import checkpoint

import fuseplug_rmsnorm
from fuseplug_rmsnorm import reference
from fuseplug_rmsnorm.reference import VARIANTS

UNGATED = [name for name, row in VARIANTS.items() if row.gate is None]
OF_PROGRAMS = KINDS if backends.NAME == "triton" else VARIANTS
"""The variants whose programs differ."""


def in_every_mix(variants):
    return pytest.mark.parametrize(("variant", "dtypes"), covering(itertools.product(variants, PAIRS)), ids=str)


@pytest.fixture
def kernel(backend):
    return backend.module("rmsnorm")


@in_every_mix(OF_PROGRAMS)
def test_every_variant_in_every_mix_of_dtypes(backend, kernel, variant, dtypes):
    for gate, group_size in itertools.product((False, True) if VARIANTS[variant].gate else (False,), (None, 16, WIDTH)):
        backend.clear()
        backend.assert_right(*both(kernel, variant, group_size=group_size), tensors(variant, *dtypes, gate), TOLERANCE)
        assert sum(backend.launches.values()) >= 2, "forward and backward"


@pytest.mark.parametrize(
    "shape", few_on("triton", [(4, 33), (1, 1), (5, 1), (7, 129), (1, 2, 1, 3, 40), (1,) * 7 + (48,)], 2)
)
@pytest.mark.parametrize("variant", ["gemma", "gated-silu"])
def test_every_number_of_rows_and_width(backend, kernel, variant, shape):
    backend.assert_right(*both(kernel, variant), tensors(variant, shape=shape), TOLERANCE)
    assert backend.launches


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"x": torch.float64, "weight": torch.float64}, {}),
        ({"x": SINGLE, "weight": torch.float64}, {}),
        ({"shape": (WIDTH,)}, {}),
        ({"shape": (3, 0, WIDTH)}, {}),
        ({"shape": (0, WIDTH)}, {"group_size": 16}),
        ({"shape": (1,) * 8 + (WIDTH,)}, {}),
    ],
    ids=str,
)
def test_rare_dtypes_and_shapes(backend, kernel, changes, options):
    backend.assert_right(*both(kernel, **options), tensors(**changes), TOLERANCE)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-2])
@pytest.mark.parametrize("variant", ["llama", "gate-first"])
def test_every_eps(backend, kernel, variant, eps):
    arguments = tensors(variant)
    if eps == 0.0:  # without eps, a row of zeros has no direction
        arguments |= {name: t[:, :3] for name, t in arguments.items() if name != "weight"}
    backend.assert_right(*both(kernel, variant, eps=eps), arguments, TOLERANCE)


@pytest.mark.parametrize("variant", KINDS)
def test_a_weight_of_zeros(backend, kernel, variant):
    """The weights before training, in norms that multiply by 1 + w or end a residual branch."""
    arguments = tensors(variant, BF16, BF16)
    backend.assert_right(*both(kernel, variant), arguments | {"weight": torch.zeros(WIDTH, dtype=BF16)}, TOLERANCE)
    assert backend.launches


def test_a_row_of_zeros_without_eps_is_nan_alone(backend, kernel):
    x = torch.ones(3, WIDTH)
    x[1] = 0
    assert kernel.rms_norm(x.to(backend.device), None, 0.0).isnan().any(-1).tolist() == [False, True, False]


def test_a_gate_and_a_large_x_do_not_overflow_in_float16(backend, kernel):
    arguments = {name: (300 * t.float()).to(HALF) for name, t in tensors("gate-first", HALF, HALF).items()}
    arguments["weight"] /= 300
    y = kernel.rms_norm(**backend.on(arguments), variant="gate-first").cpu()
    assert y.isfinite().all()
    torch.testing.assert_close(y, reference.rms_norm(**arguments, variant="gate-first"))


@pytest.mark.parametrize(
    "gate", [torch.full((2, 6, WIDTH), -300.0), torch.full((2, 6, WIDTH), 300.0)], ids=["low", "high"]
)
@pytest.mark.parametrize("variant", ["gated-silu", "gated-sigmoid"])
def test_a_gate_far_from_zero(backend, kernel, variant, gate):
    backend.assert_right(*both(kernel, variant), tensors(variant) | {"gate": gate}, TOLERANCE)


def test_a_gate_in_another_dtype(backend, kernel):
    arguments = tensors("gated-silu", BF16, BF16)
    backend.assert_right(*both(kernel, "gated-silu"), arguments | {"gate": arguments["gate"].float()}, TOLERANCE)


def test_the_same_bits_each_time_and_the_arguments_stay(backend, kernel):
    arguments = backend.on(tensors("gated-silu", shape=(70, WIDTH)))
    before = {name: t.clone() for name, t in arguments.items()}
    first, second = (outcome(both(kernel, "gated-silu")[0], arguments, backend.device).values for _ in range(2))
    # On the NPU in host memory, the CPU sums over rows, in any order.
    close = {"rtol": 1e-5, "atol": 1e-4} if backend.name == "npu" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(first, second, **close)
    assert all(torch.equal(arguments[name], before[name]) for name in arguments)


VIEWS = {
    "heads before tokens": lambda x: x.transpose(0, 1),
    "part of each row, not aligned": lambda x: x[..., 3:40],
    "every other row": lambda x: x.flatten(0, 1)[::2],
    "the same row again and again": lambda x: x[:1, :1].expand(3, 1, WIDTH),
    "overlapping rows": lambda x: x.flatten().unfold(0, 20, 5),
    "one row": lambda x: x[1, 2],
    "every other row of some": lambda x: x[:, ::4],
    "every other element": lambda x: x[..., ::2],
    "columns for rows": lambda x: x.transpose(-1, -2),
    "rows broadcast": lambda x: x[:, :1].expand(2, 6, WIDTH),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("variant", few_on("triton", ["gated-silu", "gemma", "gate-first"]))
def test_every_layout(backend, kernel, variant, view):
    backend.assert_right(*viewed(VIEWS[view], *both(kernel, variant)), tensors(variant), TOLERANCE)


@pytest.mark.parametrize(
    "view",
    [
        lambda x, weight, gate: {"x": x.transpose(0, 1), "weight": weight, "gate": gate.view(6, 2, WIDTH)},
        lambda x, weight, gate: {"x": x, "weight": weight, "gate": torch.cat((gate, x), -1)[..., :WIDTH]},
        lambda x, weight, gate: {"x": x[..., :24], "weight": weight[::2], "gate": gate[..., :24]},
    ],
    ids=["another order", "other strides", "a weight with gaps"],
)
def test_x_weight_and_gate_in_different_layouts(backend, kernel, view):
    seen = [lambda f=f, **arguments: f(**view(**arguments)) for f in both(kernel, "gated-silu")]
    backend.assert_right(*seen, tensors("gated-silu"), TOLERANCE)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("expanded", [False, True])
def test_gradients_come_in_any_layout(backend, kernel, expanded, order):
    arguments = backend.on(tensors("gated-silu"), "x", "weight", "gate")
    shape = (1, 1, 1) if expanded else (6, 2, WIDTH)
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(backend.device).transpose(0, 1)

    def gradients(module):
        x, gate = (arguments[name].permute(*order, 2) for name in ("x", "gate"))
        y = module.rms_norm(x, arguments["weight"], variant="gated-silu", gate=gate)
        grad = upstream.expand(2, 6, WIDTH).permute(*order, 2)
        return torch.autograd.grad(y, list(arguments.values()), grad)

    torch.testing.assert_close(gradients(kernel), gradients(reference), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    "wanted", few_on("triton", [n for r in (1, 2) for n in itertools.combinations(("x", "weight", "gate"), r)], 4)
)
def test_only_wanted_gradients_are_computed(backend, kernel, wanted):
    arguments = backend.on(tensors("gated-silu", shape=(70, WIDTH)), *wanted)

    def gradients(module):
        y = module.rms_norm(**arguments, variant="gated-silu")
        y.backward(torch.ones_like(y))
        gradients = {name: t.grad for name, t in arguments.items()}
        for t in arguments.values():
            t.grad = None
        return gradients

    ours, theirs = gradients(kernel), gradients(reference)
    assert {name for name, gradient in ours.items() if gradient is not None} == set(wanted)
    for name in wanted:
        # A row near zero has gradients in the thousands. Where they cancel, the rounding is of their size.
        atol = 1e-4 + 1e-6 * theirs[name].abs().max().item()
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=atol)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_gradient_is_wanted(backend, kernel, context):
    arguments = backend.on(tensors(), "x", "weight")
    with context():
        y = kernel.rms_norm(**arguments)
        torch.testing.assert_close(y, reference.rms_norm(**arguments))
    assert y.grad_fn is None
    assert sum(backend.launches.values()) == 1


@pytest.mark.parametrize("variant", KINDS)
def test_a_second_derivative_is_right_or_refused(backend, kernel, variant):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    arguments = backend.on(tensors(variant, shape=(3, 8)) | {"x": x}, "x", "weight", "gate")

    def twice(function, tensors):
        loss = function(**tensors, variant=variant).square().sum()
        first = torch.autograd.grad(loss, list(tensors.values()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(tensors.values()))

    if not backend.differentiable_twice:
        with pytest.raises(RuntimeError, match="npu_rms_norm of torch_npu has no second derivative"):
            twice(kernel.rms_norm, arguments)
        return
    expected = twice(reference.rms_norm, {n: t.detach().double().requires_grad_() for n, t in arguments.items()})
    torch.testing.assert_close(
        twice(kernel.rms_norm, arguments), tuple(t.float() for t in expected), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(backend, kernel, use_reentrant):
    arguments = backend.on(tensors(), "x", "weight")
    checkpoint(kernel.rms_norm, *arguments.values(), use_reentrant=use_reentrant).sum().backward()
    (expected,) = torch.autograd.grad(reference.rms_norm(**arguments).sum(), arguments["weight"])
    torch.testing.assert_close(arguments["weight"].grad, expected, rtol=1e-5, atol=1e-4)
    assert sum(backend.launches.values()) == 3


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_see_the_reference(backend, kernel, transform):
    arguments = backend.on(tensors())
    ours, theirs = (lambda x, m=m: m.rms_norm(x, arguments["weight"]) for m in (kernel, reference))
    torch.testing.assert_close(transform(ours)(arguments["x"]), transform(theirs)(arguments["x"]), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("weight", [SINGLE, BF16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_under_autocast_dtypes_are_those_of_the_reference(backend, kernel, variant, weight):
    arguments = backend.on(tensors(variant, BF16, weight))
    with torch.autocast(backend.device, BF16):
        ours, theirs = (module.rms_norm(**arguments, variant=variant) for module in (kernel, reference))
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"variant": "lama"}, "unknown RMSNorm variant 'lama'; known: llama, cast-last"),
        ({"weight": torch.ones(7)}, r"weight must have shape \(8,\).*it has \(7,\)"),
        ({"weight": torch.ones(1)}, r"weight must have shape \(8,\).*it has \(1,\)"),
        ({"gate": torch.ones(2, 8)}, "'llama' takes no gate"),
        ({"gate": torch.ones(1, 8), "variant": "gated-silu"}, r"gate must have the shape of x, \(2, 8\).*\(1, 8\)"),
        ({"group_size": 3}, "group_size must divide the last dimension of x, 8; it is 3"),
        ({"x": torch.tensor(1.0)}, "it is a scalar"),
    ],
)
def test_what_does_not_fit_is_named(kernel, arguments, why):
    for module in (kernel, reference):
        with pytest.raises(ValueError, match=why):
            module.rms_norm(**{"x": torch.ones(2, 8), **arguments})


@pytest.mark.parametrize("variant", few_on("triton", KINDS, 2))
def test_inside_torch_compile_it_is_one_graph(backend, kernel, variant):
    torch.compiler.reset()
    ours, theirs = both(kernel, variant, group_size=16)
    backend.clear()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    backend.assert_right(compiled, theirs, tensors(variant, BF16, BF16), TOLERANCE)
    assert bool(backend.launches) == (backend.name != "inductor")  # left for the compiler around it to fuse further


@in_every_mix(VARIANTS)
def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(fake_backend, variant, dtypes):
    for group_size in (None, 16):
        functions = both(fake_backend.module("rmsnorm"), variant, group_size=group_size)
        assert_alike(*(outcome(f, tensors(variant, *dtypes), fake_backend.device).values for f in functions))


def assert_alike(ours, theirs):
    assert all(value is not None for value in ours.values())
    assert [(t.shape, t.dtype) for t in ours.values()] == [(t.shape, t.dtype) for t in theirs.values()]


class TestTheNormOfASum:
    @pytest.fixture
    def check(self, backend, kernel):
        def check(arguments, variant="llama", view=lambda **arguments: arguments, used=slice(None)):
            def called(function):
                return lambda **arguments: function(**view(**arguments))[used]

            functions = map(called, both(kernel, variant, "add_rms_norm"))
            backend.assert_right(*functions, arguments, TOLERANCE)

        return check

    @pytest.mark.parametrize(
        "dtypes",
        few_on("triton", [(HALF, HALF), (BF16, BF16), (SINGLE, SINGLE), (HALF, SINGLE), (SINGLE, HALF)], 2),
        ids=str,
    )
    @pytest.mark.parametrize(
        "variant", [name for name in UNGATED if name in KINDS] if backends.NAME == "triton" else UNGATED
    )
    def test_in_every_variant(self, check, dtypes, variant):
        check(summands(dtypes[0], weight=dtypes[1]), variant)

    @pytest.mark.parametrize(
        "changes",
        [
            {"shape": (1, 33)},
            {"shape": (WIDTH,)},
            {"shape": (2, 3, 4, 5)},
            {"shape": (0, WIDTH)},
            {"shape": (1,) * 8 + (WIDTH,)},
            {"x": torch.float64},
            {"x": BF16, "residual": SINGLE},
        ],
        ids=str,
    )
    def test_of_every_shape_and_dtype(self, check, changes):
        check(summands(**changes))

    @pytest.mark.parametrize(
        "view",
        [
            lambda x, residual, weight: {"x": x.transpose(0, 1), "residual": residual.view(6, 2, -1), "weight": weight},
            lambda x, residual, weight: {
                "x": x,
                "residual": torch.cat((residual, x), -1)[..., :WIDTH],
                "weight": weight,
            },
        ],
    )
    def test_in_different_layouts(self, check, view):
        check(summands(), view=view)

    @pytest.mark.parametrize("used", [0, 1])
    def test_either_result_may_be_left_unused(self, backend, kernel, used):
        ours, theirs = both(kernel, name="add_rms_norm")
        backend.assert_right(
            lambda **arguments: ours(**arguments)[used] + 0 * arguments["weight"],
            lambda **arguments: theirs(**arguments)[used] + 0 * arguments["weight"],
            summands(),
            TOLERANCE,
        )

    @pytest.mark.parametrize("wanted", ["x", "residual", "weight"])
    def test_frozen_arguments_have_no_gradient(self, backend, kernel, wanted):
        arguments = backend.on(summands(), wanted)
        sum(kernel.add_rms_norm(**arguments)).sum().backward()
        assert [name for name, t in arguments.items() if t.grad is not None] == [wanted]

    def test_x_may_be_its_own_residual(self, backend, kernel):
        x = torch.randn(3, WIDTH).to(backend.device).requires_grad_()
        ours, theirs = (torch.autograd.grad(sum(m.add_rms_norm(x, x)).sum(), x) for m in (kernel, reference))
        torch.testing.assert_close(ours, theirs)

    def test_gradients_can_be_added_to(self, backend, kernel):
        arguments = backend.on(summands(), "x", "residual", "weight")
        for _ in range(2):
            kernel.add_rms_norm(**arguments)[0].square().sum().backward()
        assert arguments["x"].grad.data_ptr() != arguments["residual"].grad.data_ptr()
        assert torch.equal(arguments["x"].grad, arguments["residual"].grad)

    def test_a_second_derivative_is_right_or_refused(self, backend, kernel):
        arguments = summands(shape=(3, 8)) | {"x": torch.linspace(-1, 1, 24).view(3, 8)}

        def twice(module, dtype):
            leaves = [t.to(backend.device, dtype).requires_grad_() for t in arguments.values()]
            y, total = module.add_rms_norm(*leaves)
            first = torch.autograd.grad((y.pow(3) + total.pow(3)).sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

        if backend.differentiable_twice:
            expected = tuple(t.float() for t in twice(reference, torch.float64))
            torch.testing.assert_close(twice(kernel, SINGLE), expected, rtol=1e-3, atol=1e-3)
        else:
            with pytest.raises(RuntimeError, match=r"once_differentiable|to not have been used in the graph"):
                twice(kernel, SINGLE)

    @pytest.mark.parametrize("variant", few_on("triton", UNGATED, 3))
    def test_under_autocast_dtypes_are_those_of_the_reference(self, backend, kernel, variant):
        arguments = backend.on(summands(BF16))
        with torch.autocast(backend.device, BF16):
            ours, theirs = (m.add_rms_norm(**arguments, variant=variant) for m in (kernel, reference))
        assert [t.dtype for t in ours] == [t.dtype for t in theirs]
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)

    def test_other_shapes_are_refused(self, kernel):
        x = torch.ones(2, WIDTH)
        with pytest.raises(ValueError, match=r"residual must have the shape of x, \(2, 48\); it has \(48,\)"):
            kernel.add_rms_norm(x, x[0], x[0])
        with pytest.raises(ValueError, match="weight must have shape"):
            kernel.add_rms_norm(x, x, x)

    def test_compiles_as_one_graph(self, backend, kernel):
        torch.compiler.reset()
        ours, theirs = both(kernel, name="add_rms_norm")
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        backend.assert_right(compiled, theirs, summands(BF16), TOLERANCE)

    @pytest.mark.parametrize("dtype", few_on("triton", DTYPES), ids=str)
    def test_of_fake_tensors(self, fake_backend, dtype):
        functions = both(fake_backend.module("rmsnorm"), name="add_rms_norm")
        assert_alike(*(outcome(f, summands(dtype), fake_backend.device).values for f in functions))


def test_the_public_functions_are_the_kernel_where_there_is_a_device_for_it(backend, kernel):
    arguments = backend.on({"x": torch.ones(2, WIDTH), "residual": torch.ones(2, WIDTH)})
    y, total = fuseplug_rmsnorm.add_rms_norm(**arguments)
    assert torch.equal(y, kernel.rms_norm(total))
    assert torch.equal(y, fuseplug_rmsnorm.rms_norm(total))
    assert bool(backend.launches)


def test_the_public_functions_compile_as_one_graph(backend, kernel):
    def block(x, residual, weight):
        y, total = fuseplug_rmsnorm.add_rms_norm(x, residual, weight)
        return fuseplug_rmsnorm.rms_norm(y, weight, variant="gemma") + total

    torch.compiler.reset()
    arguments = backend.on(summands())
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**arguments), block(**arguments))
