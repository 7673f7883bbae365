"""The reference is exact where it can be, and its errors name what does not fit."""

import math

import pytest
import torch
from torch.distributions import Normal
from torch.nn import functional

from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_swiglu.reference import LAYOUTS, VARIANTS, sparsify, swiglu

LIMIT, SCALE, SPARSITY = 0.7, 0.4, 0.8
BY_THE_BOOK = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * Normal(0.0, 1.0).cdf(x),
    "gelu_tanh": lambda x: x / 2 * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x**2 * (x > 0),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "swish": lambda x: x / (1 + (-1.5 * x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}
BY_THE_BOOK |= {"gelu_new": BY_THE_BOOK["gelu_tanh"], "gelu_fast": BY_THE_BOOK["gelu_tanh"]}
BY_THE_BOOK |= {"gelu_erf": BY_THE_BOOK["gelu"]}


def numbers(variant):
    given = {"limit": LIMIT, "scale": SCALE, "sparsity": SPARSITY}
    return {name: given[name] for name in VARIANTS[variant].needs}


def inputs(dtype=torch.float64, shape=(3, 8)):
    generator = torch.Generator().manual_seed(0)
    return list(2 * torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype))


def by_the_book(gate, up, activation, variant):
    how = VARIANTS[variant]
    if how.scaled:
        gate = gate * SCALE
    if how.sparse:
        deviations = Normal(torch.zeros(()), torch.ones(())).icdf(torch.tensor(SPARSITY)).double()
        gate = (gate - gate.mean(-1, keepdim=True) - deviations * gate.std(-1, keepdim=True, correction=0)).relu()
    if how.clamp == "before":
        gate = gate.minimum(torch.tensor(LIMIT, dtype=gate.dtype))
    gate = BY_THE_BOOK[activation](gate)
    if how.clamp == "after":
        gate = gate.minimum(torch.tensor(LIMIT, dtype=gate.dtype))
    if how.clamp:
        up = up.clamp(-LIMIT, LIMIT)
    return gate * (1 + up if how.offset else up)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_activation_in_every_variant_is_the_formula_in_float64(activation, variant):
    gate, up = inputs()
    found = swiglu(gate, up, activation=activation, variant=variant, beta=1.5, **numbers(variant))
    tolerance = 1e-8 if activation == "gelu_fast" else 1e-12  # its constant has ten digits
    torch.testing.assert_close(found, by_the_book(gate, up, activation, variant), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("activation", "variant"), [(a, "plain") for a in ACTIVATIONS] + [("gelu", v) for v in VARIANTS]
)
def test_gradients_are_those_of_the_function(activation, variant):
    tensors = [t.requires_grad_() for t in inputs()]
    function = lambda *t: swiglu(*t, activation=activation, variant=variant, **numbers(variant))  # noqa: E731
    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gate_and_up_in_one_are_what_they_are_apart(variant, layout):
    gate, up = inputs(torch.float32)
    order = [up, gate] if layout == "gate-second" else [gate, up]
    both = torch.stack(order, -1).flatten(-2) if layout == "interleaved" else torch.cat(order, -1)
    both.requires_grad_()
    found = swiglu(both, variant=variant, layout=layout, **numbers(variant))
    # On processors without AVX-512, torch's silu rounds differently if gate and up lie side by side.
    close = {"rtol": 8 * torch.finfo(torch.float32).eps, "atol": 0.0}
    torch.testing.assert_close(found, swiglu(gate, up, variant=variant, **numbers(variant)), **close)
    (gradient,) = torch.autograd.grad(found.sum(), both)
    assert gradient.shape == both.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_rounded_where(dtype):
    gate, up = inputs(dtype)
    plain, wide = (swiglu(gate, up, variant=variant) for variant in ("plain", "wide"))
    assert plain.dtype is wide.dtype is dtype
    assert torch.equal(plain, functional.silu(gate) * up)
    assert torch.equal(wide, (functional.silu(gate.float()) * up.float()).to(dtype))
    assert not torch.equal(plain, wide)


def test_a_quantile_leaves_that_share():
    rows = torch.randn(4, 1 << 14, generator=torch.Generator().manual_seed(0))
    for sparsity in (0.5, 0.95):
        zeros = (sparsify(rows, sparsity) == 0).float().mean()
        assert abs(zeros - sparsity) < 0.01
    assert torch.equal(swiglu(rows, rows, variant="sparse", sparsity=0.0), swiglu(rows, rows))


def test_an_infinite_limit_is_none():
    gate, up = inputs(torch.float32)
    for variant in ("clamp-before", "clamp-after"):
        assert torch.equal(swiglu(gate, up, variant=variant, limit=math.inf), swiglu(gate, up))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (1, 8), (2, 3, 4, 7), (3, 0)])
@pytest.mark.parametrize("variant", ["plain", "clamp-before-offset"])
def test_any_number_of_rows_in_any_rank(variant, shape):
    gate, up = inputs(torch.float32, shape)
    assert swiglu(gate, up, variant=variant, **numbers(variant)).shape == shape


def test_the_inputs_are_left_alone():
    gate, up = inputs(torch.float32)
    before = gate.clone(), up.clone()
    for variant in VARIANTS:
        swiglu(gate, up, variant=variant, **numbers(variant))
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])
