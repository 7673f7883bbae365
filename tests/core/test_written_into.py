"""Writing into a tensor between forward and backward is allowed or refused as with the original."""

import itertools

import pytest
import torch
from support.thorough import covering

from fuseplug_moe import reference as mixture_reference
from fuseplug_moe.backends import inductor as mixtures
from fuseplug_rmsnorm import reference as norm_reference
from fuseplug_rmsnorm.backends import inductor as norms
from fuseplug_swiglu import reference as gate_reference
from fuseplug_swiglu.backends import inductor as gates


def gradients(compute, tensors, written):
    """The gradients after a write into input number *written*, or into the output; ``None`` if torch refuses."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    inputs = [leaf * 1 for leaf in leaves]
    y = compute(*inputs)
    with torch.no_grad():
        (y if written == len(inputs) else inputs[written]).add_(1)
    try:
        return torch.autograd.grad(y, leaves, torch.ones_like(y))
    except RuntimeError as error:
        assert "modified" in str(error)  # noqa: PT017 - the other outcome is right, too
        return None


def compare(fused, reference, tensors, written):
    want, found = (gradients(compute, tensors, written) for compute in (reference, fused))
    assert (found is None) == (want is None)
    if want is not None:
        torch.testing.assert_close(found, want, rtol=5e-2, atol=5e-1)


@pytest.mark.parametrize(
    ("variant", "dtype", "rows", "written"),
    covering(itertools.product(["llama", "gemma"], [torch.float32, torch.bfloat16], [4, 512], range(3))),
    ids=str,
)
def test_norms(variant, dtype, rows, written):
    tensors = torch.randn(rows, 256).to(dtype), torch.rand(256).to(dtype)
    compare(
        lambda x, w: norms.rms_norm(x, w, variant=variant),
        lambda x, w: norm_reference.rms_norm(x, w, variant=variant),
        tensors,
        written,
    )


@pytest.mark.parametrize(("rows", "written"), covering(itertools.product([4, 2048], range(3))))
def test_gates(rows, written):
    tensors = torch.randn(rows, 256).bfloat16(), torch.randn(rows, 256).bfloat16()
    compare(
        lambda gate, up: gates.swiglu(gate, up, activation="relu2"),
        lambda gate, up: gate_reference.swiglu(gate, up, activation="relu2"),
        tensors,
        written,
    )


@pytest.mark.parametrize("written", range(5), ids=["x", "weights", "gate_up", "down", "y"])
@pytest.mark.parametrize("tokens", [3, 200])
def test_mixtures(tokens, written):
    index = torch.randint(0, 4, (tokens, 2))
    tensors = torch.randn(tokens, 16), torch.rand(tokens, 2), torch.randn(4, 32, 16), torch.randn(4, 16, 16)
    compare(
        lambda x, weights, gate_up, down: mixtures.moe(x, index, weights, gate_up, down),
        lambda x, weights, gate_up, down: mixture_reference.moe(x, index, weights, gate_up, down),
        tensors,
        written,
    )
