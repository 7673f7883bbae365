"""The reference is exact where it can be, and its errors name what does not fit."""

import pytest
import torch

from fuseplug_rmsnorm.reference import VARIANTS, rms_norm

UNGATED = [name for name, how in VARIANTS.items() if how.gate is None]
GATED = [name for name, how in VARIANTS.items() if how.gate]


def inputs(variant, dtype=torch.float64, rows=3, width=8):
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, rows, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(width, generator=generator, dtype=torch.float64).to(dtype)
    return x, weight, gate if variant in GATED else None


def by_the_book(x, weight, eps, variant, gate):
    how = VARIANTS[variant]
    act = (lambda t: t * torch.sigmoid(t)) if how.activation == "silu" else torch.sigmoid
    scale = weight + 1 if how.offset else weight
    if how.gate == "before":
        x = x * act(gate)
    if how.weight == "input":
        x, scale = x * scale, 1
    y = x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * scale
    return y * act(gate) if how.gate == "after" else y


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_the_formula_in_float64(variant):
    x, weight, gate = inputs(variant)
    found = rms_norm(x, weight, 1e-3, variant=variant, gate=gate)
    torch.testing.assert_close(found, by_the_book(x, weight, 1e-3, variant, gate), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_function(variant):
    x, weight, gate = inputs(variant)
    tensors = [t.requires_grad_() for t in (x, weight, gate) if t is not None]
    assert torch.autograd.gradcheck(
        lambda x, weight, gate=None: rms_norm(x, weight, 1e-3, variant=variant, gate=gate), tensors
    )


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "torch"])
def test_groups_are_normalised_each_on_its_own(variant):
    x, weight, gate = inputs(variant)
    whole = rms_norm(x, weight, 1e-3, variant=variant, gate=gate, group_size=4)
    for part in (slice(0, 4), slice(4, 8)):
        gate_part = None if gate is None else gate[..., part]
        alone = rms_norm(x[..., part], weight[part], 1e-3, variant=variant, gate=gate_part)
        torch.testing.assert_close(whole[..., part], alone)


@pytest.mark.parametrize(
    ("variant", "x", "weight", "expected"),
    [
        ("llama", torch.bfloat16, torch.float32, torch.float32),
        ("llama", torch.float32, torch.bfloat16, torch.float32),
        ("cast-last", torch.bfloat16, torch.float32, torch.bfloat16),
        ("gemma", torch.float16, torch.float32, torch.float16),
        ("t5", torch.float32, torch.bfloat16, torch.bfloat16),
        ("t5", torch.bfloat16, torch.float32, torch.float32),
        ("no-upcast", torch.float16, torch.float32, torch.float32),
    ],
)
def test_the_output_has_the_dtype_that_the_models_give(variant, x, weight, expected):
    assert rms_norm(torch.ones(2, 4, dtype=x), torch.ones(4, dtype=weight), variant=variant).dtype is expected


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (1, 8), (2, 3, 4, 8)])
def test_any_number_of_rows_in_any_rank(variant, shape):
    _, weight, _ = inputs(variant)
    x = torch.randn(shape, dtype=torch.float64)
    gate = torch.randn(shape, dtype=torch.float64) if variant in GATED else None
    assert rms_norm(x, weight, variant=variant, gate=gate).shape == shape


@pytest.mark.parametrize("variant", GATED)
def test_a_gated_norm_without_a_gate_is_a_norm(variant):
    x, weight, _ = inputs(variant)
    torch.testing.assert_close(rms_norm(x, weight, variant=variant), rms_norm(x, weight, variant="llama"))


def test_the_input_is_left_alone():
    x, weight, _ = inputs("llama", torch.float32)
    before = x.clone()
    rms_norm(x, weight)
    assert torch.equal(x, before)
