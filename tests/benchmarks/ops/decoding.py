"""A decoding step, of one token for each sequence, which reads and writes the state of a mixer.

Scans are timed in a module, with and without `manager.apply_all`, so that the guard's time counts, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from fuseplug import manager
from fuseplug_gated_delta_rule import gated_delta_rule
from fuseplug_gated_delta_rule.reference import gated_delta_rule as exact_delta_rule
from fuseplug_selective_scan.reference import selective_scan as exact_scan
from fuseplug_ssd.reference import ssd as exact_ssd

from ..contest.aims import moving_bytes
from ..contest.problems import EAGER, FORWARD, OURS, Contender, Function, Kind, Least, Op, Problem, normal
from .linear_attention import SUMS

STATES = 16
HEAD = (64, 128)
"""The width and the states of a head of Mamba-2's published models."""


class Shape(NamedTuple):
    sequences: int
    width: int


class Mamba(nn.Module):
    """A mixer's step for one token. It also looks up a scan, as mixers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj = nn.Linear(2, 2, dtype=dtype)

    def forward(
        self, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *more: Any
    ) -> Any:
        dt_bias, z = more
        return mamba_selective_state_update(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=True)

    def scan(self, *arguments: Any) -> Any:
        return mamba_selective_scan(*arguments)


class Mamba2(Mamba):
    """The same for Mamba-2."""

    def forward(
        self, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
    ) -> Any:
        return mamba2_selective_state_update(state, x, dt, A, B, C, D, z=None, dt_bias=dt_bias, dt_softplus=True)

    def scan(self, *arguments: Any) -> Any:
        return mamba2_chunk_scan(*arguments)


def scan_step(shape: Shape, kind: Kind) -> Problem:
    """A step of *width* channels of `STATES` states each. The state, the decays and the bias are in float32."""
    count, channels = shape
    x, dt, z, B, C = (normal(kind, count, width) for width in (channels, channels, channels, STATES, STATES))
    state = torch.randn(count, channels, STATES, device=kind.device)
    A = -torch.arange(1.0, STATES + 1, device=kind.device).repeat(channels, 1)
    ones = torch.ones(channels, device=kind.device)

    def exact(state: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        x, dt, A, B, C, D, bias, z = arguments
        x, dt, B, C, z = (tensor.unsqueeze(-1) for tensor in (x, dt, B, C, z))
        y, last = exact_scan(x, dt, A, B, C, D, z, bias, initial_state=state, delta_softplus=True)
        return y.squeeze(-1), last

    return _step(shape, (state, x, dt, A, B, C, ones.to(kind.dtype), -4 * ones, z), exact)


def chunk_step(shape: Shape, kind: Kind) -> Problem:
    """A step of *width* heads in one group. Single numbers of a head are expanded, as mixers expand them."""
    (count, heads), (width, states) = shape, HEAD
    x, dt = normal(kind, count, heads, width), normal(kind, count, heads)
    B, C = (normal(kind, count, 1, states) for _ in range(2))
    state = torch.randn(count, heads, width, states, device=kind.device)
    decay = -torch.arange(1.0, heads + 1, device=kind.device)
    ones = torch.ones(heads, device=kind.device, dtype=kind.dtype)
    each = [tensor.unsqueeze(-1).expand(*tensor.shape, width) for tensor in (dt, ones, -4 * ones)]

    def exact(state: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        x, dt, A, B, C, D, bias = arguments
        x, dt, B, C = (tensor.unsqueeze(1) for tensor in (x, dt[..., 0], B, C))
        heads = (A[:, 0, 0], B, C, D[:, 0], bias[:, 0])
        y, last = exact_ssd(x, dt, *heads, initial_states=state, dt_softplus=True)
        return y.squeeze(1), last

    A = decay.view(heads, 1, 1).expand(heads, width, states)
    return _step(shape, (state, x, each[0], A, B, C, *each[1:]), exact)


def delta_rule_step(shape: Shape, kind: Kind) -> Problem:
    """A step of *width* heads of 128 channels, with one decay for each head."""
    count, heads = shape
    q, k, v = (normal(kind, count, 1, heads, 128) for _ in range(3))
    g, beta = -torch.rand(count, 1, heads, device=kind.device), normal(kind, count, 1, heads).sigmoid()
    state = torch.randn(count, heads, 128, 128, device=kind.device)
    return _step(shape, (state, q, k, v, g, beta), with_state(exact_delta_rule, normalised=True))


def _step(shape: Shape, arguments: tuple[Tensor, ...], exact: Function) -> Problem:
    moved = 2 * arguments[0].nbytes + sum(tensor.nbytes for tensor in arguments[1:])
    return Problem(
        f"{shape.sequences} × {shape.width}",
        arguments,
        (),
        exact,
        {FORWARD: Least(moved)},
        by_row=False,
        roundings=SUMS,
    )


def with_state(function: Callable[..., Any], **options: Any) -> Function:
    """*function* with the state as its first argument; a call returns the result and the new state."""
    return lambda state, *arguments: function(*arguments, initial_state=state, **options)


def in_module(kind: type[Mamba], kernel_id: str = "") -> Callable[[Sequence[Tensor]], Function]:
    def make(arguments: Sequence[Tensor]) -> Function:
        module = kind(arguments[1].dtype)
        if kernel_id:
            applied = manager.apply_all(module, include=[kernel_id], every_size=True)
            assert len(applied.report.fused) == 2, applied.report
        return lambda state, *others: (module(state, *others), state)

    return make


def _op(name: str, problem: Callable[[Shape, Kind], Problem], *contenders: Contender, shapes: Sequence[Shape]) -> Op:
    return Op(name, problem, shapes, shapes[0], (Shape(2, 4),), contenders, contenders[0], moving_bytes)


SCAN_STEP = _op(
    "selective_scan_step",
    scan_step,
    Contender(OURS, in_module(Mamba, "inductor_fused_selective_scan"), writes=True),
    Contender(EAGER, in_module(Mamba), writes=True),
    shapes=[Shape(1, 8192), Shape(4, 4096), Shape(16, 1536), Shape(4, 8192), Shape(64, 1536)],
)
CHUNK_STEP = _op(
    "ssd_step",
    chunk_step,
    Contender(OURS, in_module(Mamba2, "inductor_fused_ssd"), writes=True),
    Contender(EAGER, in_module(Mamba2), writes=True),
    shapes=[Shape(1, 24), Shape(1, 64), Shape(1, 128), Shape(8, 24), Shape(32, 24)],
)
DELTA_RULE_STEP = _op(
    "gated_delta_net_step",
    delta_rule_step,
    Contender(OURS, lambda _: with_state(gated_delta_rule, normalised=True)),
    Contender(
        EAGER,
        lambda _: with_state(torch_recurrent_gated_delta_rule, output_final_state=True, use_qk_l2norm_in_kernel=True),
    ),
    shapes=[Shape(1, 32), Shape(8, 32)],
)
