"""Linear attention and state spaces, as mixers of transformers call them: convolutions, gated delta rules, and scans.

Eager is the function of transformers that runs where no other library is installed. Every batch has one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from fuseplug_causal_conv1d import causal_conv1d
from fuseplug_causal_conv1d.reference import causal_conv1d as exact_conv1d
from fuseplug_gated_delta_rule import gated_delta_rule
from fuseplug_gated_delta_rule.reference import gated_delta_rule as exact_delta_rule
from fuseplug_selective_scan import selective_scan
from fuseplug_selective_scan.reference import selective_scan as exact_scan
from fuseplug_ssd import ssd
from fuseplug_ssd.reference import ssd as exact_ssd

from ..contest.aims import moving_bytes
from ..contest.problems import (
    BACKWARD,
    BOTH,
    EAGER,
    FORWARD,
    OURS,
    Contender,
    Function,
    Kind,
    Least,
    Op,
    Problem,
    normal,
)

FEW = 128
"""The most tokens at which results and gradients are judged: the formulas keep tensors for each token."""

SUMS = 64
"""The allowed roundings: the gradient of a decay is a sum over all tokens and channels."""


class Shape(NamedTuple):
    tokens: int


@dataclass(frozen=True)
class Recurrence:
    """One recurrence: a formula, and two implementations of it.

    Attributes:
        arguments: Makes the arguments of the formula, for a number of tokens.
        like: The index of the argument that has the shape of the result.
        exact: The formula.
        ours: The kernel's function, with the arguments of the formula.
        eager: The function of transformers, with the same arguments.
    """

    name: str
    arguments: Callable[[int, Kind], Sequence[Tensor]]
    like: int
    exact: Function
    ours: Function
    eager: Function

    def problem(self, shape: Shape, kind: Kind) -> Problem:
        arguments = tuple(tensor.requires_grad_() for tensor in self.arguments(shape.tokens, kind))
        upstream = torch.randn_like(arguments[self.like].detach())  # with the memory layout that it has in models
        moved = sum(tensor.nbytes for tensor in (*arguments, upstream))
        least = {FORWARD: Least(moved), BACKWARD: Least(2 * moved), BOTH: Least(3 * moved)}
        return Problem(str(shape.tokens), arguments, (upstream,), self.exact, least, by_row=False, roundings=SUMS)

    def op(self, *tokens: int) -> Op:
        return Op(
            self.name,
            self.problem,
            shapes=[Shape(count) for count in tokens],
            single=Shape(1),
            tiny=(Shape(70),),
            contenders=(Contender(OURS, lambda _: self.ours), Contender(EAGER, lambda _: self.eager)),
            applied=Contender(f"{OURS}, applied", lambda _: self.ours),
            aim=moving_bytes,
        )


def convolved(channels: int, width: int) -> Callable[[int, Kind], Sequence[Tensor]]:
    def arguments(tokens: int, kind: Kind) -> Sequence[Tensor]:
        return normal(kind, 1, tokens, channels).transpose(1, 2), normal(kind, channels, width), normal(kind, channels)

    return arguments


def corrected(heads: int, channels: int, *, per_channel: bool) -> Callable[[int, Kind], Sequence[Tensor]]:
    def arguments(tokens: int, kind: Kind) -> Sequence[Tensor]:
        q, k, v = (normal(kind, 1, tokens, heads, channels) for _ in range(3))
        decays = (channels,) if per_channel else ()
        g = -torch.rand(1, tokens, heads, *decays, device=kind.device) / 10
        return q, k, v, g, normal(kind, 1, tokens, heads).sigmoid()

    return arguments


def scanned(channels: int, states: int) -> Callable[[int, Kind], Sequence[Tensor]]:
    def arguments(tokens: int, kind: Kind) -> Sequence[Tensor]:
        x, dt, z = (normal(kind, 1, channels, tokens) for _ in range(3))
        B, C = (normal(kind, 1, states, tokens) for _ in range(2))
        A = -torch.arange(1.0, states + 1, device=kind.device).repeat(channels, 1)
        ones = torch.ones(channels, device=kind.device)
        return x, dt, A, B, C, ones, z, -4 * ones

    return arguments


def chunked(heads: int, width: int, groups: int, states: int) -> Callable[[int, Kind], Sequence[Tensor]]:
    def arguments(tokens: int, kind: Kind) -> Sequence[Tensor]:
        B, C = (normal(kind, 1, tokens, groups, states) for _ in range(2))
        ones = torch.ones(heads, device=kind.device, dtype=kind.dtype)
        A = -torch.arange(1.0, heads + 1, device=kind.device)
        return normal(kind, 1, tokens, heads, width), normal(kind, 1, tokens, heads), A, B, C, ones, -4 * ones

    return arguments


def first(function: Callable[..., Any], **options: Any) -> Function:
    """*function* without the state in its result."""
    return lambda *arguments: function(*arguments, **options)[0]


def mamba_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor) -> Tensor:
    scan = mamba.mamba_selective_scan
    return scan(x, dt, A, B, C, D=D, z=z, delta_bias=bias, delta_softplus=True)


def mamba2_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    """The scan of Mamba-2, in the chunks of its published models."""
    return mamba2.mamba2_chunk_scan(x, dt, A, B, C, 256, D=D, dt_bias=bias, dt_softplus=True)


CONVOLUTION = Recurrence(
    "causal_conv1d",
    convolved(4096, 4),
    0,
    exact_conv1d,
    causal_conv1d,
    lambda x, weight, bias: qwen3_5.causal_conv1d_fn(x, weight, bias, activation="silu"),
)
GATED_DELTA_NET = Recurrence(
    "gated_delta_net",
    corrected(16, 128, per_channel=False),
    2,
    first(exact_delta_rule, normalised=True),
    first(gated_delta_rule, normalised=True),
    first(qwen3_5.torch_chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True),
)
KIMI_DELTA_ATTENTION = Recurrence(
    "kimi_delta_attention",
    corrected(4, 128, per_channel=True),
    2,
    first(exact_delta_rule, normalised=True, variant="channel"),
    first(gated_delta_rule, normalised=True, variant="channel"),
    first(kimi_linear.chunk_kimi_delta_attention, use_qk_l2norm_in_kernel=True),
)
SELECTIVE_SCAN = Recurrence(
    "selective_scan",
    scanned(256, 16),
    0,
    first(exact_scan, delta_softplus=True),
    first(selective_scan, delta_softplus=True),
    mamba_scan,
)
CHUNK_SCAN = Recurrence(
    "ssd",
    chunked(16, 64, 1, 128),
    0,
    first(exact_ssd, dt_softplus=True),
    first(ssd, dt_softplus=True),
    mamba2_scan,
)
