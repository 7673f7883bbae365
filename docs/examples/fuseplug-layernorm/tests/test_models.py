"""The kernel in two models, built from configs, that have its two variants."""

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel

from fuseplug import KernelManager

IDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_head=4, n_layer=2, **IDS)), "torch", 5


def cohere():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0}
    return CohereForCausalLM(CohereConfig(hidden_size=64, intermediate_size=96, **heads, **IDS)), "cohere", 3


def step(model, tokens):
    """The loss, and the gradients of all parameters."""
    loss = model(tokens, labels=tokens).loss
    return loss.detach(), torch.autograd.grad(loss, [*model.parameters()])


@pytest.mark.parametrize("build", [gpt2, cohere])
def test_every_norm_is_fused_and_undone(build):
    torch.manual_seed(0)
    model, variant, norms = build()
    model.eval()  # without dropout
    tokens = torch.randint(64, (4, 256))  # enough for the compiled program in float32
    expected = step(model, tokens)
    with KernelManager().apply("inductor_fused_layernorm", model, every_size=True) as applied:
        assert [entry.variant for entry in applied.report.fused] == [variant] * norms, applied.report
        torch.testing.assert_close(step(model, tokens), expected, rtol=1e-3, atol=1e-5)
        assert all(calls.fused and not calls.original for calls in applied.calls())
    torch.testing.assert_close(step(model, tokens), expected, rtol=0, atol=0)
