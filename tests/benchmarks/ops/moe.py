"""A mixture of experts with uniformly random routing: three matrices for each token and each of its experts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fuseplug import manager
from fuseplug_moe.reference import moe as reference

from ..contest.aims import GROUPED, mixture
from ..contest.peers import Make, compiled, of
from ..contest.problems import (
    BACKWARD,
    BOTH,
    EAGER,
    FORWARD,
    LIGER,
    OURS,
    Contender,
    Function,
    Kind,
    Least,
    LeftOut,
    Op,
    Problem,
    normal,
)

_BATCHED_BYTES = 16 << 30


class Shape(NamedTuple):
    tokens: int
    experts: int
    k: int
    hidden: int
    inner: int


def problem(shape: Shape, kind: Kind) -> Problem:
    tokens, experts, k, hidden, inner = shape
    x, grad = (normal(kind, tokens, hidden) for _ in range(2))
    scores, index = torch.rand(tokens, experts, device=kind.device).topk(k)
    routing = (scores / scores.sum(-1, keepdim=True)).to(kind.dtype)
    gate_up = normal(kind, experts, 2 * inner, hidden).mul_(hidden**-0.5)
    down = normal(kind, experts, hidden, inner).mul_(inner**-0.5)
    return Problem(
        f"{tokens}, E={experts} K={k} H={hidden} I={inner}",
        (x.requires_grad_(), nn.Parameter(gate_up), nn.Parameter(down), index, routing.requires_grad_()),
        (grad,),
        lambda x, gate_up, down, index, routing: reference(x, index, routing, gate_up, down),
        _least(shape, len(index.unique()), kind.dtype.itemsize),
        # Float32 is three orders of magnitude finer than bfloat16. In float64, most GPUs would take minutes.
        wide=torch.float32 if kind.dtype is torch.bfloat16 else torch.float64,
        by_row=False,
    )


def _least(shape: Shape, touched: int, itemsize: int) -> dict[str, Least]:
    """Weights of experts with tokens are read once each way; the gradients of all weights are written."""
    tokens, experts, k, hidden, inner = shape
    matrices, rows = itemsize * 3 * hidden * inner, itemsize * tokens * hidden
    forward = Least(touched * matrices + 2 * rows, 2 * 3 * tokens * k * hidden * inner)
    backward = Least((touched + experts) * matrices + 3 * rows, 2 * forward.flops)
    return {FORWARD: forward, BACKWARD: backward, BOTH: Least(*map(sum, zip(forward, backward, strict=True)))}


def module(arguments: Sequence[Tensor], implementation: str) -> Qwen3MoeExperts:
    """The module of transformers, with the given weights."""
    _, gate_up, down, index, _ = arguments
    experts, hidden, inner = down.shape
    config = Qwen3MoeConfig(
        num_experts=experts, num_experts_per_tok=index.shape[1], hidden_size=hidden, moe_intermediate_size=inner
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        made = Qwen3MoeExperts(config)
    made.gate_up_proj, made.down_proj = gate_up, down
    return made


def by(implementation: str) -> Make:
    def make(arguments: Sequence[Tensor]) -> Function:
        experts = module(arguments, implementation)
        return lambda x, _gate_up, _down, index, routing: experts(x, index, routing)

    return make


def batched(arguments: Sequence[Tensor]) -> Function:
    index, down = arguments[3], arguments[2]
    copies = 3 * index.numel() * down[0].numel() * down.element_size()
    if copies > _BATCHED_BYTES:
        raise LeftOut(f"it would copy {copies >> 30} GiB of weights")
    return by("batched_mm")(arguments)


def applied(arguments: Sequence[Tensor]) -> Function:
    experts = module(arguments, GROUPED)
    assert manager.apply_all(experts).report.fused, "nothing was fused"
    return lambda x, _gate_up, _down, index, routing: experts(x, index, routing)


# Else Liger-Kernel compiles 32 to 48 forms of each of six kernels, one after another: minutes for each shape.
os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")

_LARGE, _WIDE = (128, 8, 2048, 768), (8, 2, 4096, 14336)

OP = Op(
    "moe",
    problem,
    shapes=[Shape(tokens, *size) for tokens in (4096, 128, 1, 32768) for size in (_LARGE, _WIDE)],
    single=Shape(1, *_LARGE),
    tiny=(Shape(3, 3, 2, 32, 16),),
    contenders=(
        Contender(
            OURS,
            of(
                "fuseplug_moe.backends.triton:moe",
                lambda f, x, up, down, index, routing: f(x, index, routing, up, down),
            ),
        ),
        Contender(EAGER, by("eager")),
        Contender(GROUPED, by(GROUPED)),
        Contender("batched_mm", batched),
        compiled(by(GROUPED)),
        Contender(
            LIGER,
            # called as Liger-Kernel's module for these experts calls it
            of("liger_kernel.ops:LigerFusedMoEFunction", lambda f, x, up, down, i, r: f.apply(x, up, down, i.int(), r)),
        ),
    ),
    applied=Contender(f"{OURS}, applied", applied),
    aim=mixture,
)
