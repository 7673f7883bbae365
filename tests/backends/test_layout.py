"""Results have the memory layout that elementwise operations give."""

import itertools

import pytest
import torch
from support.thorough import covering

from fuseplug_backends.inductor.layout import keeping_order
from fuseplug_rmsnorm import reference as norm_reference
from fuseplug_rmsnorm.backends import inductor as norms
from fuseplug_swiglu import reference as gate_reference
from fuseplug_swiglu.backends import inductor as gates

LAYOUTS = {
    "contiguous": lambda b, s, h, d: torch.randn(b, s, h, d),
    "heads first": lambda b, s, h, d: torch.randn(b, h, s, d).transpose(1, 2),
    "reversed": lambda b, s, h, d: torch.randn(h, s, b, d).permute(2, 1, 0, 3),
    "channels first": lambda b, s, h, d: torch.randn(b, d, s, h).permute(0, 2, 3, 1),
    "all reversed": lambda b, s, h, d: torch.randn(d, h, s, b).permute(3, 2, 1, 0),
    "slices": lambda b, s, h, d: torch.randn(b, s, h, 2 * d)[..., :d],
    "slices, heads first": lambda b, s, h, d: torch.randn(b, h, s, 2 * d)[..., d:].transpose(1, 2),
    "one head": lambda b, s, h, d: torch.randn(b, 1, s, d).transpose(1, 2),
    "one row": lambda b, s, h, d: torch.randn(b, h, 1, d).transpose(1, 2),
    "expanded": lambda b, s, h, d: torch.randn(b, 1, h, d).expand(b, s, h, d),
    "two dimensions": lambda b, s, h, d: torch.randn(d, b * s).t(),
}
in_every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
SIZES = {"small": (2, 6, 4, 16), "large": (2, 64, 8, 128)}


@in_every_layout
def test_a_result_keeps_the_order_of_what_it_is_computed_from(layout):
    x = layout(2, 3, 4, 5)
    y = keeping_order(lambda x: x.contiguous() * 2, x)
    assert torch.equal(y, x * 2)
    assert y.stride() == (x * 2).stride() or y.is_contiguous() == (x * 2).is_contiguous()


@pytest.mark.parametrize(
    ("layout", "size", "dtype"),
    covering(itertools.product(LAYOUTS, SIZES, [torch.float32, torch.bfloat16])),
    ids=str,
)
def test_norms_keep_it_forward_and_backward(layout, size, dtype):
    x = LAYOUTS[layout](*SIZES[size]).to(dtype)
    weight = torch.rand(x.shape[-1]).to(dtype)
    xs = [x.detach().requires_grad_(), x.detach().requires_grad_()]
    want, found = (c.rms_norm(x, weight) for c, x in zip((norm_reference, norms), xs, strict=True))
    # The stride of a dimension with one element means nothing.
    torch.testing.assert_close(found.squeeze(), want.squeeze(), check_stride=x.stride()[-1] != 0)
    grad = torch.randn_like(want)
    want.backward(grad)
    found.backward(grad)
    torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", SIZES)
def test_heads_that_were_normed_can_be_merged_by_a_view(size):
    batch, length, heads, width = SIZES[size]
    x = torch.randn(batch, length, heads * width).to(torch.bfloat16)
    y = norms.rms_norm(x.view(batch, length, heads, width).transpose(1, 2), torch.ones(width).to(torch.bfloat16))
    assert y.transpose(1, 2).view(batch, length, heads * width).shape == x.shape


@pytest.mark.parametrize(("layout", "halves"), covering(itertools.product(LAYOUTS, [1, 2])))
def test_gates_keep_it(layout, halves):
    gate = LAYOUTS[layout](2, 64, 16, 256).to(torch.bfloat16)
    up = LAYOUTS[layout](2, 64, 16, 256).to(torch.bfloat16) if halves == 2 else None
    want = gate_reference.swiglu(gate, up, activation="relu2")
    found = gates.swiglu(gate, up, activation="relu2")
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(_steps(found), _steps(want))


def _steps(tensor):
    """The strides of the dimensions with several elements; the others mean nothing."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
