"""Real modules with the kernels of this project: hooks, state, dtypes and calls that nobody planned for."""

import pytest
import torch
from support.attacking import attacked, numbers
from torch import nn

from fuseplug_moe.kernels import InductorMoEKernel
from fuseplug_rmsnorm.kernels import InductorRMSNormKernel
from fuseplug_rope.kernels import InductorRoPEKernel
from fuseplug_swiglu.kernels import InductorSwiGLUKernel

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen3_moe")


def config(**changes):
    return transformers.LlamaConfig(
        **{
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
        }
        | changes
    )


def llama_mlp():
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(config())


def llama_norm():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return LlamaRMSNorm(16)


def doubling(module, args, y):
    return y * 2


def double_forward(module):
    module.forward = lambda x: x * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.act_fn.register_full_backward_hook(lambda child, i, o: (i[0] * 2,)),
        lambda m: double_forward(m.act_fn),
    ],
    ids=["a full backward hook on the activation", "a forward of the activation's own"],
)
def test_a_gated_mlp_of_llama(change):
    met = attacked([InductorSwiGLUKernel], llama_mlp, change, verify=False)
    assert met.answers == ("kernel", "original"), met


def test_a_gated_mlp_of_llama_under_autocast():
    def around():
        return torch.autocast("cpu", torch.bfloat16)

    attacked([InductorSwiGLUKernel], llama_mlp, around=around, verify=False, share=2e-2)


NORMS = {
    "eps": (lambda m: setattr(m, "variance_epsilon", 0.5), "kernel"),
    "weight": (lambda m: m.weight.data.fill_(3.0), "kernel"),
    "a weight in another dtype": (lambda m: m.double(), "either"),
    "a frozen weight": (lambda m: m.weight.requires_grad_(False), "kernel"),
}


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_of_llama(case):
    change, by = NORMS[case]
    met = attacked([InductorRMSNormKernel], llama_norm, change, verify=False)
    assert by == "either" or met.last == by, met


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        made = transformers.Qwen3MoeConfig(
            hidden_size=16,
            moe_intermediate_size=8,
            num_experts=4,
            num_experts_per_tok=2,
            experts_implementation="eager",
        )
        made._experts_implementation = "eager"
        self.experts = Qwen3MoeExperts(made)
        for parameter in self.parameters():
            parameter.data = numbers(parameter.shape, scale=0.2, seed=2)

    def forward(self, x):
        index = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]], device="cpu")
        weights = torch.full((5, 2), 0.5, dtype=x.dtype, device="cpu")
        return self.experts(x, index, weights)


MIXTURES = {
    "a hook on the activation": lambda m: m.experts.act_fn.register_forward_hook(doubling),
    "a forward of the activation's own": lambda m: double_forward(m.experts.act_fn),
    "a method replaced": lambda m: setattr(m.experts, "_apply_gate", lambda y: y.chunk(2, -1)[0]),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_experts_of_qwen(case):
    if not hasattr(transformers.models.qwen3_moe.modeling_qwen3_moe, "Qwen3MoeExperts"):
        pytest.skip("this transformers has a module for each expert")
    met = attacked([InductorMoEKernel], Experts, MIXTURES[case], given=[[numbers((5, 16))]], verify=False)
    assert met.answers[0] == "kernel", met


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

        made = config(attn_implementation="eager")
        made._attn_implementation = "eager"
        self.attention = LlamaAttention(made, 0)
        self.rotary = LlamaRotaryEmbedding(made)

    def forward(self, x):
        places = torch.arange(x.shape[1], device="cpu")[None]
        return self.attention(x, self.rotary(x, places), attention_mask=None)[0]


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half"])
def test_a_rotation_of_llama_that_is_mocked(name, monkeypatch):
    from transformers.models.llama import modeling_llama

    original = getattr(modeling_llama, name)

    def mocked(*args, **kwargs):
        found = original(*args, **kwargs)
        return tuple(each * 2 for each in found) if isinstance(found, tuple) else found * 2

    met = attacked(
        [InductorRoPEKernel], Attention, lambda _: monkeypatch.setattr(modeling_llama, name, mocked), verify=False
    )
    assert met.answers == ("kernel", "original"), met


@pytest.mark.parametrize(
    ("kernel", "make", "shape"),
    [
        (InductorRMSNormKernel, llama_norm, (2, 5, 16)),
        (InductorSwiGLUKernel, llama_mlp, (2, 5, 16)),
        (InductorMoEKernel, Experts, (5, 16)),
    ],
    ids=["norm", "gated MLP", "experts"],
)
def test_another_default_device_changes_nothing(kernel, make, shape):
    # Results on meta have no numbers. A tensor that a forward makes without device= must be as in the original.
    x = numbers(shape)
    with torch.no_grad():
        attacked([kernel], make, given=[[x]], verify=False, around=lambda: torch.device("meta"))
