"""Norms and gated MLPs of transformers, each by itself: on an NPU, fused, they are what they were on the CPU."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools

import pytest
import torch
from support.thorough import covering
from support.tiny import BASE, HEAD
from transformers import AutoConfig

from fuseplug import KernelManager
from fuseplug_verify import Outcome, Tolerance

WIDTH = BASE["hidden_size"]
GEMMA3N = BASE | HEAD | {"intermediate_size": [64, 64], "activation_sparsity_pattern": [0.9, 0.0]}
# The class, the arguments of its config, the variant, and the operation of torch_npu.
NORMS = [
    ("llama", "LlamaRMSNorm", "llama", 1),
    ("qwen3", "Qwen3RMSNorm", "llama", 1),
    ("gemma2", "Gemma2RMSNorm", "gemma", 1),
    ("gemma3", "Gemma3RMSNorm", "gemma", 1),
    ("olmo2", "Olmo2RMSNorm", "cast-last", 1),
    ("gpt_oss", "GptOssRMSNorm", "cast-last", 1),
    ("t5", "T5LayerNorm", "t5", 1),
    ("qwen3_next", "Qwen3NextRMSNormGated", "gated-silu", 2),
    ("mamba2", "MambaRMSNormGated", "gate-first", 2),
    ("zamba2", "Zamba2RMSNormGated", "gate-first", 2),
]
MLPS = [
    ("llama", "LlamaMLP", BASE, "silu", "npu_swiglu"),
    ("qwen2", "Qwen2MLP", BASE, "silu", "npu_swiglu"),
    ("gemma2", "Gemma2MLP", BASE | HEAD, "gelu_tanh", "npu_geglu"),
    ("phi3", "Phi3MLP", BASE, "silu gate-first", "npu_swiglu"),
    ("glm4", "Glm4MLP", BASE | HEAD, "silu gate-first", "npu_swiglu"),
    ("modernbert", "ModernBertMLP", BASE, "gelu gate-first", "npu_geglu"),
    ("moonshine", "MoonshineDecoderMLP", BASE, "silu gate-second", "npu_swiglu"),
    ("gemma3n_text", "Gemma3nTextMLP", GEMMA3N, "gelu_tanh sparse", "npu_geglu"),
    ("falcon_h1", "FalconH1MLP", BASE, "silu scaled", "npu_swiglu"),
]
TOLERANCE = Tolerance(roundings=6.0, working_roundings=32.0, by_row=False)
"""What three projections of an MLP and the product between them round, as in the proposals of the package."""


def found(model_type, name):
    package = model_type.removesuffix("_text")
    try:
        return getattr(importlib.import_module(f"transformers.models.{package}.modeling_{package}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this version of transformers has no {name}")


def assert_fused_is_what_it_was(host_npu, module, arguments, dtype, kernel, variant, operation):
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:  # a weight of exactly one or zero would hide what is done with it
                parameter.add_(0.3 * torch.randn_like(parameter))
    module.to(dtype)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 5, WIDTH, generator=generator).to(dtype) for _ in range(arguments)]
    expected = outcome(copy.deepcopy(module), given)
    truth = outcome(copy.deepcopy(module).to(torch.float32 if dtype is not torch.float32 else torch.float64), given)
    module.to("npu")
    applied = KernelManager(environ={"FUSEPLUG_KERNELS": kernel}).apply_all(module, device="npu")
    assert [(e.kernel_id, e.variant) for e in applied.report.fused] == [(kernel, variant)], applied.report
    host_npu.calls.clear()
    fused = outcome(module, given)
    assert host_npu.calls[operation] == 1
    assert all(value is not None for value in fused.values.values())
    assert TOLERANCE.excess(fused, expected, truth) == ""


def outcome(module, given):
    """The output of a module, where it is and in its dtype, and every gradient."""
    first = next(module.parameters())
    leaves = [t.to(first.device, first.dtype, copy=True).requires_grad_() for t in given]
    y = module(*leaves)
    upstream = torch.randint(-15, 16, y.shape, generator=torch.Generator().manual_seed(1)).div(8)
    y.backward(upstream.to(y.device, y.dtype))
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    gradients |= {f"gradient of argument {number}": leaf.grad for number, leaf in enumerate(leaves)}
    return Outcome({"output": y.detach(), **gradients})


DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("model_type", "name", "variant", "arguments", "dtype"),
    covering(
        ((*norm, dtype) for norm, dtype in itertools.product(NORMS, DTYPES)),
        by=lambda model_type, name, variant, arguments, dtype: [variant, dtype],
    ),
    ids=str,
)
def test_a_norm_of_transformers(host_npu, model_type, name, variant, arguments, dtype):
    torch.manual_seed(0)
    cls = found(model_type, name)
    grouped = "group_size" in inspect.signature(cls).parameters
    module = cls(WIDTH, group_size=16) if grouped else cls(WIDTH)
    assert_fused_is_what_it_was(host_npu, module, arguments, dtype, "npu_fused_rmsnorm", variant, "npu_rms_norm")


@pytest.mark.parametrize(
    ("model_type", "name", "arguments", "variant", "operation", "dtype"),
    covering(
        ((*mlp, dtype) for mlp, dtype in itertools.product(MLPS, DTYPES)),
        by=lambda model_type, name, arguments, variant, operation, dtype: [
            variant.partition(" ")[2],
            (operation, dtype),
        ],
    ),
    ids=lambda value: str(value) if isinstance(value, (str, torch.dtype)) else None,
)
def test_a_gated_mlp_of_transformers(host_npu, model_type, name, arguments, variant, operation, dtype):
    torch.manual_seed(0)
    cls = found(model_type, name)
    config = AutoConfig.for_model(model_type, **arguments)
    module = cls(config, hidden_act="silu") if model_type == "moonshine" else cls(config)
    assert_fused_is_what_it_was(host_npu, module, 1, dtype, "npu_fused_swiglu", variant, operation)
