"""The reference computes the formula and its gradients, and its errors name what does not fit."""

import pytest
import torch
from support.causal_convolutions import tensors

from fuseplug_causal_conv1d.reference import VARIANTS, causal_conv1d


def by_the_book(x, weight, bias, variant):
    """The convolution, one token after the other."""
    y = torch.zeros_like(x)
    width = weight.shape[1]
    for token in range(x.shape[2]):
        for tap in range(width):
            source = token - width + 1 + tap
            if source >= 0:
                y[:, :, token] += weight[:, tap] * x[:, :, source]
        if bias is not None:
            y[:, :, token] += bias
    return y * torch.sigmoid(y) if variant == "silu" else y


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("width", "tokens", "bias"), [(1, 3, True), (2, 1, False), (3, 2, True), (4, 9, False), (7, 4, True)]
)
def test_it_is_the_formula_in_float64(variant, width, tokens, bias):
    arguments = tensors(torch.float64, shape=(2, 3, tokens), width=width, bias=bias)
    expected = by_the_book(*arguments.values(), *([] if bias else [None]), variant)
    torch.testing.assert_close(causal_conv1d(**arguments, variant=variant), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_gradients_are_those_of_the_function(variant):
    arguments = [t.requires_grad_() for t in tensors(torch.float64, shape=(1, 2, 5)).values()]
    assert torch.autograd.gradcheck(lambda *args: causal_conv1d(*args, variant=variant), arguments)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"variant": "gelu"}, "unknown variant of a causal convolution 'gelu'; known: silu, identity"),
        ({"x": torch.ones(6, 11)}, r"x has shape \(6, 11\); \(batch, channels, tokens\) is expected"),
        ({"weight": torch.ones(5, 4)}, r"weight has shape \(5, 4\); \(6, width\) is expected: x has 6 channels"),
        ({"weight": torch.ones(6, 0)}, r"weight has shape \(6, 0\)"),
        ({"weight": torch.ones(6, 1, 4)}, r"weight has shape \(6, 1, 4\)"),
        ({"bias": torch.ones(1)}, r"bias has shape \(1,\); \(6,\) is expected"),
    ],
)
def test_what_does_not_fit_is_said(changes, why):
    with pytest.raises(ValueError, match=why):
        causal_conv1d(**tensors() | changes)
