"""What every recogniser must get right: its examples, its adapters, and the modules that it leaves alone."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

from fuseplug import Proposal, Site
from fuseplug_moe.kernels import MoEKernel
from fuseplug_moe.specimens.stacked_experts import StackedExperts
from fuseplug_rmsnorm.kernels import RMSNormKernel
from fuseplug_rope.kernels import RoPEKernel
from fuseplug_rope.specimens.halves import Half
from fuseplug_swiglu.kernels import SwiGLUKernel
from fuseplug_swiglu.specimens.mlps import Separate

OPS = {
    "rmsnorm": (RMSNormKernel, lambda: nn.RMSNorm(48)),
    "swiglu": (SwiGLUKernel, lambda: Separate(nn.SiLU())),
    "rope": (RoPEKernel, Half),
    "moe": (MoEKernel, lambda: StackedExperts(4, 12, 7)),
}
OTHERS = [
    nn.Linear(4, 4),
    nn.Embedding(4, 4),
    nn.LayerNorm(4),
    nn.GroupNorm(2, 4),
    nn.BatchNorm1d(4),
    nn.Conv1d(4, 4, 3, groups=4),
    nn.Bilinear(3, 4, 5),
    nn.SiLU(),
    nn.PReLU(),
    nn.Dropout(0.1),
    nn.Identity(),
    nn.LSTM(4, 4),
    nn.MultiheadAttention(8, 2),
    nn.TransformerEncoderLayer(8, 2),
    nn.Sequential(nn.Linear(4, 8), nn.GLU()),
    nn.ModuleList([nn.Linear(4, 4)]),
    nn.Module(),
]
every_op = pytest.mark.parametrize("op", OPS)


def answer(op, module):
    return importlib.import_module(f"fuseplug_{op}.recognise.structure").match(Site("layers.0", module, "cpu"))


def proposal_of(op, dtype=torch.float32) -> Proposal:
    (proposal,) = answer(op, OPS[op][1]().to(dtype))
    return proposal


def tensors_of(proposal, size, seed=0):
    """The floating-point tensors of an example in the first mix."""
    example = proposal.example(proposal.mixes[0], size, torch.Generator().manual_seed(seed))
    below = [parameter for child in example.children.values() for parameter in child.parameters()]
    held = [value for value in example.attributes.values() if isinstance(value, torch.Tensor)]
    tensors = [tensor for tensor in example.args if isinstance(tensor, torch.Tensor)]
    return [tensor for tensor in (*tensors, *example.parameters.values(), *below, *held) if tensor.is_floating_point()]


@every_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_first_mix_is_how_the_module_stands(op, dtype):
    assert {tensor.dtype for tensor in tensors_of(proposal_of(op, dtype), 64)} == {dtype}


@every_op
def test_a_stand_in_on_meta_is_enough(op):
    with torch.device("meta"):
        proposal = proposal_of(op)
    assert {tensor.device.type for tensor in tensors_of(proposal, 64)} == {"cpu"}


@every_op
def test_examples_are_repeatable_and_of_the_size_that_is_asked_for(op):
    proposal = proposal_of(op)
    one, two, other = (tensors_of(proposal, 64, seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, one, two))
    assert not torch.equal(one[0], other[0])
    assert one[0].numel() < 1 << 13 <= tensors_of(proposal, 1 << 13)[0].numel()


@every_op
def test_adapters_are_values(op):
    one, two = (proposal_of(op).adapters for _ in range(2))
    assert tuple(one) == tuple(two)
    assert hash(one[0]) == hash(two[0])
    assert pickle.loads(pickle.dumps(one[-1])) == copy.deepcopy(one[-1]) == one[-1]


@every_op
def test_a_third_party_names_only_what_differs(op):
    base, make = OPS[op]
    declared = {"kernel_id": "chip_kernel", "function": base.reference, "device_types": ("chip",)}
    found = type("Chip", (base,), declared)().propose(site=Site("layers.0", make(), "cpu"))
    assert found.kernel_id == "chip_kernel"
    assert found.proposals[0].adapters[0].variant == proposal_of(op).adapters[0].variant


@every_op
@pytest.mark.parametrize("module", OTHERS, ids=lambda module: type(module).__name__)
def test_what_is_none_of_its_business_is_answered_none(op, module):
    assert answer(op, module) is None
