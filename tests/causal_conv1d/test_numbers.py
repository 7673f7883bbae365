"""Causal convolutions on each backend: values and gradients, layouts, dtypes, and the calls left to the reference."""

import itertools

import pytest
import torch
from support.causal_convolutions import BF16, PAIRS, SINGLE, TOLERANCE, both, tensors
from support.thorough import covering

from fuseplug_causal_conv1d.reference import VARIANTS


@pytest.fixture
def kernel(backend):
    return backend.module("causal_conv1d")


@pytest.mark.parametrize(
    ("variant", "dtypes", "width", "bias"),
    covering(itertools.product(VARIANTS, PAIRS, [1, 2, 3, 4, 7], [True, False])),
    ids=str,
)
def test_every_variant_width_and_mix_of_dtypes(backend, kernel, variant, dtypes, width, bias):
    backend.assert_right(*both(kernel, variant), tensors(*dtypes, width=width, bias=bias), TOLERANCE)
    assert sum(backend.launches.values()) >= 2, "forward and backward"


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 1), (3, 4, 2), (2, 3, 33), (1, 2, 70), (4, 1, 64)], ids=str)
@pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
def test_every_size_shorter_than_the_weight_or_longer(backend, kernel, dtype, shape):
    backend.assert_right(*both(kernel), tensors(dtype, shape=shape), TOLERANCE)
    assert backend.launches


VIEWS = {
    "tokens side by side": lambda x: x.contiguous(),
    "a part of the channels": lambda x: x[:, 1:4],
    "the last tokens": lambda x: x.contiguous()[:, :, 3:],
    "every other token": lambda x: x[:, :, ::2],
    "the same token again and again": lambda x: x[:, :, :1].expand(-1, -1, 9),
    "the same batch again and again": lambda x: x[:1].expand(3, -1, -1),
    "batches between tokens": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "not aligned": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_layout(backend, kernel, view):
    ours, theirs = both(kernel)
    look = VIEWS[view]
    arguments = tensors()
    channels = look(arguments["x"]).shape[1]
    arguments |= {name: arguments[name][:channels] for name in ("weight", "bias")}

    def seen(function):
        return lambda x, weight, bias: function(look(x), weight.t().contiguous().t(), bias)

    backend.assert_right(seen(ours), seen(theirs), arguments, TOLERANCE)
    assert backend.launches


def test_the_result_lies_as_the_input(backend, kernel):
    x = tensors(shape=(2, 6, 8))["x"].to(backend.device)
    weight = tensors()["weight"].to(backend.device)
    assert kernel.causal_conv1d(x, weight).transpose(1, 2).is_contiguous()
    assert kernel.causal_conv1d(x.contiguous(), weight).is_contiguous()


def test_what_is_empty_is_the_references(backend, kernel):
    ours, theirs = both(kernel)
    arguments = tensors(shape=(0, 6, 11))
    moved = backend.on(arguments)
    backend.clear()
    torch.testing.assert_close(ours(**moved).cpu(), theirs(**arguments))
    assert not backend.launches


def test_a_bias_of_another_dtype_is_refused_as_the_reference_refuses_it(backend, kernel):
    arguments = backend.on(tensors(BF16) | {"bias": torch.ones(6)})
    for function in both(kernel):
        with pytest.raises(RuntimeError):
            function(**arguments)


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_windows(backend, kernel, special):
    arguments = tensors()
    arguments["x"][0, 2, 5] = special
    ours, theirs = both(kernel, "identity")
    y = ours(**backend.on(arguments)).cpu()
    torch.testing.assert_close(y, theirs(**arguments), equal_nan=True)
    assert y.isfinite().logical_not().sum() == 4


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_does_not_meet_the_zeros_before_the_first_token(backend, kernel, special):
    arguments = tensors()
    arguments["weight"][2, 0] = special
    ours, theirs = both(kernel, "identity")
    y = ours(**backend.on(arguments)).cpu()
    torch.testing.assert_close(y, theirs(**arguments), equal_nan=True)
    assert y[0, 2].isfinite().sum() == 3


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias")], ids=str)
def test_only_the_gradients_that_are_wanted(backend, kernel, wanted):
    found, expected = (
        torch.autograd.grad(function(**leaves).float().square().sum(), [leaves[name] for name in wanted])
        for function, leaves in zip(both(kernel), (backend.on(tensors(), *wanted), _leaves(wanted)), strict=True)
    )
    torch.testing.assert_close([g.cpu() for g in found], list(expected), rtol=1e-5, atol=1e-4)


def _leaves(wanted):
    return {name: t.detach().clone().requires_grad_(name in wanted) for name, t in tensors().items()}


def test_a_gradient_that_is_one_number_repeated(backend, kernel):
    leaves, expected = backend.on(tensors(), "x", "weight"), _leaves(("x", "weight"))
    for function, arguments in zip(both(kernel), (leaves, expected), strict=True):
        function(**arguments).sum().backward()
    for name in ("x", "weight"):
        torch.testing.assert_close(leaves[name].grad.cpu(), expected[name].grad, rtol=1e-5, atol=1e-4)


def test_a_second_derivative(backend, kernel):
    if not backend.differentiable_twice:
        pytest.skip("the operations have none, and say so")
    arguments = list(backend.on(tensors(torch.float64, shape=(1, 2, 5)), "x", "weight", "bias").values())
    function = both(kernel)[0]
    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


def test_transforms_of_torch_func(backend, kernel):
    ours, theirs = both(kernel)
    arguments, moved = list(tensors().values()), list(backend.on(tensors()).values())

    def penalty(function):
        return torch.func.grad(lambda x, weight, bias: function(x, weight, bias).square().sum())

    torch.testing.assert_close(penalty(ours)(*moved).cpu(), penalty(theirs)(*arguments), rtol=1e-5, atol=1e-4)


def test_the_input_may_be_written_into_where_the_original_keeps_another(backend, kernel):
    arguments = tensors(BF16, SINGLE)
    leaves, expected = (
        backend.on(arguments, "weight"),
        {**arguments, "weight": arguments["weight"].clone().requires_grad_()},
    )
    for function, given in zip(both(kernel), (leaves, expected), strict=True):
        y = function(**given)
        given["x"].zero_()
        given["bias"].zero_()
        y.float().square().sum().backward()
    torch.testing.assert_close(leaves["weight"].grad.cpu(), expected["weight"].grad, rtol=2e-2, atol=2e-2)
    kept = backend.on(tensors(), "weight")
    y = both(kernel)[0](**kept)
    kept["x"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_under_autocast_the_result_has_the_dtype_of_the_input(backend, kernel):
    ours, theirs = both(kernel)
    arguments = tensors(BF16, SINGLE)
    with torch.autocast(backend.device, torch.bfloat16):
        y = ours(**backend.on(arguments)).cpu()
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(**arguments)
    assert y.dtype is expected.dtype is BF16
    torch.testing.assert_close(y, expected, rtol=4e-2, atol=4e-2)
