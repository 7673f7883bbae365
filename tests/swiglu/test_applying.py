"""What `apply_all` does with gated MLPs, on each backend."""

import pytest
import torch
from support.thorough import few_on
from torch import nn

from fuseplug_swiglu.specimens.mlps import InOne, Multiplied, Offset, Separate, Sparse, Wide

pytestmark = pytest.mark.usefixtures("small_checks")

# One for each way in which an adapter calls the kernel: all others differ only in their numbers.
MODULES = {
    "silu": lambda: Separate(nn.SiLU()),
    "silu interleaved": lambda: InOne(nn.SiLU(), "interleaved"),
    "gelu_tanh sparse": lambda: Sparse(nn.GELU("tanh"), 0.9),
    "swish clamp-before-offset gate-first": Offset,
    "silu scaled": Multiplied,
    "silu wide": Wide,
}


@pytest.mark.parametrize("variant", few_on("triton", MODULES, 0))
def test_modules_are_fused_and_undone(backend, variant):
    backend.module("swiglu")
    model = nn.Sequential(MODULES[variant]()).to(backend.device, torch.bfloat16)
    x = torch.randn(2, 3, next(model.parameters()).shape[-1]).to(backend.device, torch.bfloat16)
    before = model(x)
    applied = backend.manager("swiglu").apply_all(model)
    (entry,) = applied.report.fused
    assert (entry.kernel_id, entry.variant, entry.check) == (f"{backend.name}_fused_swiglu", variant, "passed")
    backend.clear()
    model(x).float().square().mean().backward()
    assert backend.launches
    assert all(parameter.grad is not None for parameter in model.parameters())
    applied.undo()
    assert torch.equal(model(x), before)


def test_a_multiplier_that_is_made_learnable_gets_its_gradient(backend):
    backend.module("swiglu")
    model = Multiplied().to(backend.device)
    assert backend.manager("swiglu").apply_all(model, verify=False).report.fused
    model.gate_multiplier = nn.Parameter(torch.tensor(0.25, device=backend.device))
    model(torch.randn(2, 3, model.gate_proj.in_features, device=backend.device)).square().sum().backward()
    assert model.gate_multiplier.grad is not None
