"""The ops, shapes and references of the benchmark for GPUs, with the contenders on an NPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
from benchmarks.contest.aims import GROUPED
from benchmarks.contest.peers import of
from benchmarks.contest.problems import EAGER, OURS, Contender, Function, Kind, Op, Problem
from benchmarks.ops import linear_cross_entropy, moe, rmsnorm, rope, swiglu
from torch import Tensor

TRITON = "triton-ascend"
OWN = {
    rmsnorm.OP.name: Contender(
        "npu_rms_norm", of("torch_npu:npu_rms_norm", lambda f, x, weight: f(x, weight, rmsnorm.EPS)[0])
    ),
    swiglu.OP.name: Contender(
        "npu_swiglu", of("torch_npu:npu_swiglu", lambda f, gate, up: f(torch.cat((gate, up), -1), dim=-1))
    ),
    rope.OP.name: Contender(
        "npu_rotary_mul",
        of(
            "torch_npu:npu_rotary_mul",
            lambda f, q, k, cos, sin: tuple(f(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)),
        ),
    ),
}
"""The operations of torch_npu, called as patches of models call them. torch_npu has none for a whole mixture of
experts, and none for a loss that makes no logits."""


def on_npu(op: Op) -> Op:
    """*op* with ours as `manager.apply_all` applies it, eager, torch_npu's operation, and ours for triton-ascend."""
    contenders = {contender.name: contender for contender in op.contenders}
    ours = contenders[OURS]

    def by_triton(arguments: Sequence[Tensor]) -> Function:
        metadata.distribution(TRITON)
        return ours.make(arguments)

    def problem(shape: Any, kind: Kind) -> Problem:
        return replace(op.problem(shape, kind), wide=torch.float32)  # an NPU has few operations in float64

    peers = (contenders[EAGER], contenders.get(GROUPED), OWN.get(op.name), Contender(TRITON, by_triton))
    taking_part = (replace(op.applied, name=OURS), *filter(None, peers))
    return replace(op, problem=problem, contenders=taking_part, aim=lambda *_: None)


OPS = {op.name: on_npu(op) for op in (rmsnorm.OP, swiglu.OP, rope.OP, moe.OP, linear_cross_entropy.OP)}
