"""A step of decoding, of one token for each sequence: it reads the state of a mixer, and writes it.

Scans are timed in a module, with and without `manager.apply_all`, so that the guard takes its time, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from fuseplug import manager
from fuseplug_gated_delta_rule import gated_delta_rule
from fuseplug_gated_delta_rule.reference import gated_delta_rule as exact_delta_rule
from fuseplug_selective_scan.reference import selective_scan as exact_scan

from ..contest.aims import moving_bytes
from ..contest.problems import EAGER, FORWARD, OURS, Contender, Function, Kind, Least, Op, Problem, normal

STATES = 16


class Shape(NamedTuple):
    sequences: int
    width: int


class Decoding(nn.Module):
    """What a mixer makes of one token; it looks up a scan as well, as mixers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj = nn.Linear(2, 2, dtype=dtype)

    def forward(
        self, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *more: Any
    ) -> Any:
        z, dt_bias = more
        return mamba_selective_state_update(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=True)

    def scan(self, *arguments: Any) -> Any:
        return mamba_selective_scan(*arguments)


def scan_step(shape: Shape, kind: Kind) -> Problem:
    """Of *width* channels of `STATES` states each; what does not depend on the token is in float32."""
    count, channels = shape
    x, dt, z, B, C = (normal(kind, count, width) for width in (channels, channels, channels, STATES, STATES))
    state = torch.randn(count, channels, STATES, device=kind.device)
    A = -torch.arange(1.0, STATES + 1, device=kind.device).repeat(channels, 1)
    ones = torch.ones(channels, device=kind.device)

    def exact(state: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        x, dt, A, B, C, D, z, bias = arguments
        x, dt, B, C, z = (tensor.unsqueeze(-1) for tensor in (x, dt, B, C, z))
        y, last = exact_scan(x, dt, A, B, C, D, z, bias, initial_state=state, delta_softplus=True)
        return y.squeeze(-1), last

    return _step(shape, (state, x, dt, A, B, C, ones.to(kind.dtype), z, -4 * ones), exact)


def delta_rule_step(shape: Shape, kind: Kind) -> Problem:
    """Of *width* heads of 128 channels; a head has a decay."""
    count, heads = shape
    q, k, v = (normal(kind, count, 1, heads, 128) for _ in range(3))
    g, beta = -torch.rand(count, 1, heads, device=kind.device), normal(kind, count, 1, heads).sigmoid()
    state = torch.randn(count, heads, 128, 128, device=kind.device)
    return _step(shape, (state, q, k, v, g, beta), corrected(exact_delta_rule, normalised=True))


def _step(shape: Shape, arguments: tuple[Tensor, ...], exact: Function) -> Problem:
    moved = 2 * arguments[0].nbytes + sum(tensor.nbytes for tensor in arguments[1:])
    return Problem(f"{shape.sequences} × {shape.width}", arguments, (), exact, {FORWARD: Least(moved)}, by_row=False)


def corrected(function: Callable[..., Any], **options: Any) -> Function:
    """The result and the state after it."""
    return lambda state, *arguments: function(*arguments, initial_state=state, **options)


def in_module(*, fused: bool) -> Callable[[Sequence[Tensor]], Function]:
    def make(arguments: Sequence[Tensor]) -> Function:
        module = Decoding(arguments[1].dtype)
        if fused:
            applied = manager.apply_all(module, include=["inductor_fused_selective_scan"], every_size=True)
            assert len(applied.report.fused) == 2, applied.report
        return lambda state, *others: (module(state, *others), state)

    return make


def _op(name: str, problem: Callable[[Shape, Kind], Problem], *contenders: Contender, shapes: Sequence[Shape]) -> Op:
    return Op(name, problem, shapes, shapes[0], (Shape(2, 4),), contenders, contenders[0], moving_bytes)


SCAN_STEP = _op(
    "selective_scan_step",
    scan_step,
    Contender(OURS, in_module(fused=True), writes=True),
    Contender(EAGER, in_module(fused=False), writes=True),
    shapes=[Shape(1, 8192), Shape(4, 4096), Shape(16, 1536), Shape(4, 8192), Shape(64, 1536)],
)
DELTA_RULE_STEP = _op(
    "gated_delta_net_step",
    delta_rule_step,
    Contender(OURS, lambda _: corrected(gated_delta_rule, normalised=True)),
    Contender(
        EAGER,
        lambda _: corrected(torch_recurrent_gated_delta_rule, output_final_state=True, use_qk_l2norm_in_kernel=True),
    ),
    shapes=[Shape(1, 32), Shape(8, 32)],
)
