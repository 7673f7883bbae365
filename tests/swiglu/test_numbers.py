"""Gated MLPs on each backend: values and gradients of every variant and layout, and the calls left to the reference."""

import itertools
import math

import pytest
import torch
from support import backends
from support.gates import (
    BF16,
    DOUBLE,
    DTYPES,
    EVERY_LAYOUT,
    HALF,
    INNER,
    NUMBERS,
    SINGLE,
    TOLERANCE,
    both,
    is_served,
    options,
    tensors,
)
from support.judging import outcome
from support.thorough import covering, few_on
from support.transforms import TRANSFORMS
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_swiglu import reference
from fuseplug_swiglu.reference import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # by the interpreter's exp; the result is 0

SERVED = [pair for pair in itertools.product(ACTIVATIONS, VARIANTS) if is_served(*pair)]


def together(activation, variant):
    """What must occur of the two: Triton's programs write each activation once for all variants."""
    return activation if backends.NAME == "triton" else (activation, variant)


@pytest.fixture
def kernel(backend):
    return backend.module("swiglu")


@pytest.fixture
def check(backend, kernel):
    """Compares with the reference: ``check(arguments, view=…, **options)``."""

    def check(arguments, view=lambda x: x, **options):
        backend.assert_right(*both(kernel, view, **options), arguments, TOLERANCE[backend.name])

    return check


@pytest.mark.parametrize(
    ("activation", "variant", "layout", "dtype"),
    covering(
        ((*pair, layout, dtype) for pair, layout, dtype in itertools.product(SERVED, EVERY_LAYOUT, DTYPES)),
        by=lambda activation, variant, layout, dtype: [together(activation, variant), (variant, layout), dtype],
    ),
    ids=str,
)
def test_every_activation_variant_and_layout_in_every_dtype(backend, check, activation, variant, layout, dtype):
    check(tensors(layout, dtype), **options(activation, variant, layout))
    assert sum(backend.launches.values()) >= 1


@pytest.mark.parametrize(
    ("variant", "dtypes"),
    covering(itertools.product(VARIANTS, [(BF16, SINGLE), (SINGLE, BF16), (HALF, BF16)])),
    ids=str,
)
def test_gate_and_up_of_two_dtypes(check, variant, dtypes):
    check(tensors(None, *dtypes), **options(variant=variant))


SHAPES = [(1, INNER), (1, 1), (4, 1), (3, 13), (2, 2, 1, 16), (1,) * 7 + (INNER,), (INNER,), (0, INNER), (3, 0, INNER)]


def in_every_shape(layout, shape, activation):
    """What must occur: on NPUs, the two activations are two operations, so each needs every shape."""
    return (layout, (shape, activation) if backends.NAME == "npu" else shape)


@pytest.mark.parametrize(
    ("layout", "shape", "activation"),
    covering(itertools.product(EVERY_LAYOUT, SHAPES, ("gelu", "silu")), by=in_every_shape),
    ids=str,
)
def test_every_number_of_rows_and_columns(check, layout, shape, activation):
    check(tensors(layout, shape=shape), **options(activation, layout=layout))


VIEWS = {
    "transposed": lambda x: x.transpose(0, 1),
    "every other row": lambda x: x[:, ::2],
    "every other column": lambda x: x[..., ::2],
    "columns of wider rows": lambda x: x[..., 4:10],
    "columns of wider rows, transposed": lambda x: x[..., 4:10].transpose(0, 1),
    "one row, expanded": lambda x: x[:1, :1].expand(4, 3, -1),
    "columns as rows": lambda x: x.transpose(-1, -2),
    "one column of each": lambda x: x[..., 3:4].expand(-1, -1, 2),
}


@pytest.mark.parametrize(("layout", "view"), covering(itertools.product(EVERY_LAYOUT, VIEWS)))
@pytest.mark.parametrize(
    ("activation", "variant"),
    [pair for pair in [("silu", "plain"), ("swish", "clamp-before-offset")] if is_served(*pair)],
)
def test_inputs_need_not_be_contiguous(check, activation, variant, layout, view):
    arguments = {name: t.reshape(2, 4, -1) for name, t in tensors(layout, shape=(8, 12)).items()}
    before = {name: t.clone() for name, t in arguments.items()}
    check(arguments, VIEWS[view], **options(activation, variant, layout))
    assert all(torch.equal(t, before[name]) for name, t in arguments.items())


@pytest.mark.parametrize(
    "part",
    [
        lambda gate: reference.split(gate, "gate-first"),
        lambda gate: reference.split(gate, "interleaved"),
        lambda gate: (gate[..., :INNER], gate[..., INNER - 1 : -1]),
    ],
)
def test_gate_and_up_may_be_views_of_one_tensor(backend, kernel, part):
    functions = [lambda gate, f=f: f(*part(gate), activation="gelu") for f in (kernel.swiglu, reference.swiglu)]
    backend.assert_right(*functions, tensors("gate-first"), TOLERANCE[backend.name])


@pytest.mark.parametrize("wider", ["gate", "up"])
def test_gate_and_up_may_be_of_rows_of_different_stride(backend, kernel, wider):
    def cut(function):
        return lambda **given: function(**given | {wider: given[wider][..., 2 : 2 + INNER]})

    arguments = tensors() | {wider: tensors(shape=(2, 3, INNER + 5))[wider]}
    backend.assert_right(*map(cut, both(kernel)), arguments, TOLERANCE[backend.name])


@pytest.mark.parametrize(
    "upstream", [lambda y: y.new_ones(()).expand_as(y), lambda y: torch.randn_like(y.mT).contiguous().mT]
)
def test_the_upstream_gradient_need_not_be_contiguous(backend, kernel, upstream):
    arguments = list(backend.on(tensors(), "gate", "up").values())
    y = kernel.swiglu(*arguments)
    dy = upstream(y.detach())
    expected = torch.autograd.grad(reference.swiglu(*arguments), arguments, dy)
    torch.testing.assert_close(torch.autograd.grad(y, arguments, dy), expected)


@pytest.mark.parametrize(
    "arguments",
    [tensors(dtype=DOUBLE), tensors(dtype=SINGLE, up=DOUBLE), {"gate": torch.ones(()), "up": torch.ones(())}],
    ids=["float64", "float64 up", "no dimension"],
)
def test_what_is_rare_is_right(check, arguments):
    check(arguments, **options())


KINKED = [
    options("relu"),
    options("relu2"),
    options("silu", "clamp-before"),
    options("sigmoid", "clamp-after"),
    options("silu", "clamp-before-offset"),
    options("silu", "clamp-before", limit=math.inf),
    options("relu", "clamp-after", limit=0.0),
    options("relu", "clamp-before", limit=-1.0),
]


@pytest.mark.skipif(backends.NAME == "npu", reason="no page of torch_npu says what its operations do there")
@pytest.mark.parametrize("options", KINKED, ids=str)
def test_at_a_kink_the_gradient_is_that_of_torch(backend, kernel, options):
    values = (-NUMBERS["limit"], 0.0, -0.0, NUMBERS["limit"], math.nan, -2.0, 2.0)
    pairs = torch.tensor(list(itertools.product(values, values))).T[:, None].to(backend.device)
    for dy in (1.0, math.inf):
        results = []
        for module in (kernel, reference):
            leaves = [t.clone().requires_grad_() for t in pairs]
            y = module.swiglu(*leaves, **options)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, torch.full_like(y, dy))])
        torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e4, -1e4])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if is_served(name, "plain")])
def test_what_is_large_or_not_finite_comes_out_as_it_does_exactly(backend, kernel, activation, value):
    gate, up = torch.tensor([[value, 1.0, value, -1.0]]), torch.tensor([[1.0, value, value, 1.0]])
    exact = reference.swiglu(gate.double(), up.double(), activation=activation)
    y = kernel.swiglu(gate.to(backend.device), up.to(backend.device), activation=activation).double().cpu()
    # With the vectors of AVX-512, torch's own gelu of inf in float32 is NaN, so ours may be NaN, too.
    excused = y.isnan() & functional.gelu(gate).isnan() & activation.startswith("gelu")
    torch.testing.assert_close(y, exact.masked_fill(excused, math.nan), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_only_the_gradients_that_are_needed(backend, kernel, wanted):
    arguments = backend.on(tensors(), wanted)
    ours, theirs = (
        torch.autograd.grad(m.swiglu(**arguments, **options("gelu")).sum(), arguments[wanted])[0]
        for m in (kernel, reference)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_nothing_is_kept_but_gate_and_up(backend, kernel, layout):
    kept = {}
    arguments = backend.on(tensors(layout, BF16), "gate", "up")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        y = kernel.swiglu(**arguments, **options(layout=layout))
    assert sum(t.numel() for t in kept.values()) == 2 * y.numel()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_gradient_is_wanted(backend, kernel, context):
    arguments = backend.on(tensors(), "gate", "up")
    with context():
        assert kernel.swiglu(**arguments).grad_fn is None
    assert kernel.swiglu(*(t.detach() for t in arguments.values())).grad_fn is None


@pytest.mark.parametrize("layout", [None, "gate-second"])
@pytest.mark.parametrize("variant", few_on("triton", ["plain", *(name for name in VARIANTS if name != "plain")], 2))
def test_a_second_derivative_is_right_or_refused(backend, kernel, variant, layout):
    how = options("gelu_tanh", variant, layout)

    def twice(function):
        arguments = backend.on(tensors(layout), "gate", "up")
        leaves = list(arguments.values())[: 2 if layout is None else 1]
        first = torch.autograd.grad(function(**arguments, **how).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)

    if not backend.differentiable_twice and is_served("gelu_tanh", variant):
        with pytest.raises(RuntimeError, match="npu_geglu of torch_npu has no second derivative"):
            twice(kernel.swiglu)
    else:
        torch.testing.assert_close(twice(kernel.swiglu), twice(reference.swiglu), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(backend, kernel, use_reentrant):
    leaves = list(backend.on(tensors(), "gate", "up").values())
    checkpoint(kernel.swiglu, *leaves, use_reentrant=use_reentrant).sum().backward()
    expected = list(torch.autograd.grad(reference.swiglu(*leaves).sum(), leaves))
    torch.testing.assert_close([t.grad for t in leaves], expected)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_transforms_see_the_reference(backend, kernel, transform, activation):
    x = torch.stack((*backend.on(tensors()).values(),), dim=1)
    ours, theirs = (
        transform(lambda x, f=module.swiglu: f(x[0], x[1], activation=activation)) for module in (kernel, reference)
    )
    torch.testing.assert_close(ours(x), theirs(x))
    assert not backend.launches


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_results_repeat_to_the_bit(backend, kernel, layout):
    function = both(kernel, **options(layout=layout))[0]
    once, again = (outcome(function, tensors(layout, BF16, shape=(9, 40)), backend.device).values for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)


def test_sparsity_keeps_what_the_original_keeps(backend, kernel):
    arguments = backend.on(tensors(dtype=BF16, shape=(8, 64)))
    for sparsity in (0.0, 0.6):
        how = options("relu", "sparse", sparsity=sparsity)
        ours, theirs = (module.swiglu(**arguments, **how) == 0 for module in (kernel, reference))
        assert torch.equal(ours.cpu(), theirs.cpu())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_refused_as_by_the_reference(backend, kernel, dtype):
    gate = torch.ones(4, 8, dtype=dtype, device=backend.device)
    messages = []
    for module in (kernel, reference):
        with pytest.raises(RuntimeError) as caught:
            module.swiglu(gate, gate)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "plane"}, "unknown variant of a gated MLP 'plane'; known: plain, wide"),
        ({"activation": "swiglu"}, "unknown activation 'swiglu'; known: silu, gelu"),
        ({"up": None, "layout": "first"}, "unknown layout 'first'; known: gate-first"),
        ({"up": torch.ones(2, 7)}, r"up must have the shape of gate, \(2, 8\); it has \(2, 7\)"),
        ({"up": torch.ones(1, 8)}, r"up must have the shape of gate, \(2, 8\); it has \(1, 8\)"),
        ({"up": None, "gate": torch.ones(2, 7)}, r"gate must be \(..., 2 \* intermediate\); it has \(2, 7\)"),
        ({"up": None, "gate": torch.tensor(1.0)}, r"it has \(\)"),
        ({"limit": 7.0}, "variant 'plain' takes no limit"),
        ({"variant": "clamp-after"}, "variant 'clamp-after' needs a limit"),
        ({"variant": "sparse"}, "variant 'sparse' needs a sparsity"),
        ({"variant": "scaled", "scale": 1.0, "sparsity": 0.1}, "variant 'scaled' takes no sparsity"),
    ],
)
def test_what_does_not_fit_is_named(kernel, arguments, message):
    for module in (kernel, reference):
        with pytest.raises(ValueError, match=message):
            module.swiglu(**{"gate": torch.ones(2, 8), "up": torch.ones(2, 8), **arguments})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_under_autocast_dtypes_are_those_of_the_reference(backend, kernel, activation):
    arguments = backend.on(tensors(dtype=BF16))
    with torch.autocast(backend.device, dtype=BF16):
        ours, theirs = (module.swiglu(**arguments, activation=activation) for module in (kernel, reference))
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", few_on("triton", EVERY_LAYOUT, 2))
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_inside_torch_compile_it_is_one_graph(backend, kernel, activation, layout):
    torch.compiler.reset()
    ours, theirs = both(kernel, **options(activation, layout=layout))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    backend.clear()
    backend.assert_right(compiled, theirs, tensors(layout, BF16), TOLERANCE[backend.name])
    if backend.name == "inductor":  # left for the compiler around it to fuse further
        assert not backend.launches


@pytest.mark.parametrize(("variant", "layout"), covering(itertools.product(VARIANTS, EVERY_LAYOUT)))
def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(fake_backend, variant, layout):
    functions = both(fake_backend.module("swiglu"), **options(variant=variant, layout=layout))
    for dtype in DTYPES:
        ours, theirs = (outcome(f, tensors(layout, dtype), fake_backend.device).values for f in functions)
        assert all(value is not None for value in ours.values())
        assert [(t.shape, t.dtype) for t in ours.values()] == [(t.shape, t.dtype) for t in theirs.values()]
