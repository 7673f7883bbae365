"""The same decoder layers, fused in different ways, with shared weights."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from fuseplug import manager

from ..contest.peers import imported
from ..contest.problems import COMPILED, EAGER, LIGER, OURS, Kind

Run = Callable[[Tensor], Tensor]
"""Takes token ids, and returns hidden states."""


class Blocks(NamedTuple):
    """Layers of one shape, and the number and length of the sequences they get."""

    name: str
    model_type: str
    config: dict[str, Any]
    batch: int
    sequence: int

    def make(self, kind: Kind) -> nn.Module:
        """The layers between embedding and head."""
        config = AutoConfig.for_model(self.model_type, **self.config)
        with kind.device:
            return AutoModel.from_config(config, dtype=kind.dtype)


_LAYERS = {"vocab_size": 8192, "num_hidden_layers": 2, "head_dim": 128, "num_attention_heads": 32}
_DENSE = {"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 8}
_EXPERTS = {
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "head_dim": 16, "hidden_size": 32, "num_key_value_heads": 2}
_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FULL = (
    Blocks("Qwen3-8B", "qwen3", _LAYERS | _DENSE, 2, 4096),
    Blocks("Qwen3-30B-A3B", "qwen3_moe", _LAYERS | _EXPERTS, 2, 4096),
)
TINY = (
    Blocks("Qwen3-8B", "qwen3", _DENSE | _SMALL | {"num_attention_heads": 4, "intermediate_size": 48}, 1, 5),
    Blocks("Qwen3-30B-A3B", "qwen3_moe", _EXPERTS | _SMALL | {"num_attention_heads": 4} | _FEW, 1, 5),
)


def shared(model: nn.Module) -> nn.Module:
    """A copy of *model* that shares its parameters."""
    return copy.deepcopy(model, memo={id(parameter): parameter for parameter in model.parameters()})


def eager(model: nn.Module) -> Run:
    return lambda ids: model(input_ids=ids, use_cache=False).last_hidden_state


def fused(model: nn.Module) -> Run:
    assert manager.apply_all(model).report.fused, "nothing was fused"
    return eager(model)


def compiled(run: Run, device: torch.device) -> Run:
    return torch.compile(run, dynamic=False, backend="inductor" if device.type == "cuda" else "eager")


def liger(model: nn.Module) -> Run:
    """Run *model* with everything that Liger-Kernel has for it, except the loss.

    Liger-Kernel changes the module of transformers, which the other contenders use, too. So the changes are in place
    only during a run.
    """
    kind = model.config.model_type
    apply = imported(f"liger_kernel.transformers:apply_liger_kernel_to_{kind}")
    modeling = vars(importlib.import_module(type(model).__module__))
    before = dict(modeling)
    apply(model=model, fused_linear_cross_entropy=False)
    changed = {name: value for name, value in modeling.items() if value is not before.get(name)}
    modeling.update(before)

    run = eager(model)

    def patched(ids: Tensor) -> Tensor:
        modeling.update(changed)
        try:
            return run(ids)
        finally:
            modeling.update(before)

    return patched


CONTENDERS: dict[str, Callable[[nn.Module], Run]] = {
    OURS: fused,
    EAGER: eager,
    LIGER: liger,
    COMPILED: lambda model: compiled(eager(model), model.device),
    f"{OURS}, under {COMPILED}": lambda model: compiled(fused(model), model.device),
}
"""Contenders that take long to start come last, so that they are the ones left out if the time is over."""
