"""Context parallelism: torch's `context_parallel` deals out parts of each sequence to two processes.

Torch has no ring attention for CPUs: "Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a
sharding strategy registered". So the attention here gathers the keys and values. Everything else is as on a GPU.
"""

import pytest
import torch
import transformers
from support.ranks import failures
from support.tiny import build
from torch import distributed

from fuseplug import KernelManager

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed"),
]

KERNELS = ["inductor_fused_rmsnorm", "inductor_fused_swiglu", "inductor_fused_rope"]
TOKENS = torch.arange(32).view(2, 16) * 7 % 57 + 3


def everywhere(x, dim):
    """The processes' parts of *x*, concatenated along *dim*."""
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(x.contiguous()), dim)


def gathering_attention(module, query, key, value, _mask, scaling=None, position_ids=None, **_):
    groups = query.shape[1] // key.shape[1]
    key, value = (everywhere(each, 2).repeat_interleave(groups, 1) for each in (key, value))
    later = everywhere(position_ids, 1)[:, None, None, :] > position_ids[:, None, :, None]
    scores = (query @ key.mT * scaling).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def step(model, mesh):
    """This process's positions and logits, and the gradients summed over the processes."""
    from torch.distributed.tensor.experimental import context_parallel

    model.zero_grad()
    tokens, positions = TOKENS.clone(), torch.arange(16).repeat(2, 1)
    with context_parallel(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1]):
        here = positions.clone()
        logits = model(input_ids=tokens, position_ids=here, use_cache=False).logits
        logits.square().mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    for each in gradients.values():
        distributed.all_reduce(each)
    return here, logits.detach(), gradients


def check(model_type):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole = build(model_type)(input_ids=TOKENS, use_cache=False).logits
    transformers.AttentionInterface.register("gathering", gathering_attention)
    model = build(model_type).train()
    model.set_attn_implementation("gathering")
    positions, logits, gradients = step(model, mesh)
    assert positions.shape == (2, 8)  # a half of each sequence: its first and its last quarter, or the two between
    at = positions[..., None].expand_as(logits)
    torch.testing.assert_close(logits, whole.gather(1, at), rtol=1e-4, atol=1e-5)

    applied = KernelManager().apply_all(model, include=KERNELS, verify=False)
    assert not applied.report.left_alone, applied.report
    _, fused, fused_gradients = step(model, mesh)
    torch.testing.assert_close(fused, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused_gradients, gradients, rtol=1e-3, atol=1e-5)
    assert all(calls.fused and not calls.original for calls in applied.calls()), applied.calls()
    applied.undo()
    assert torch.equal(step(model, mesh)[1], logits)


def test_parts_of_sequences_are_computed_as_unfused():
    assert not failures(check, [("llama",), ("qwen3",)])
