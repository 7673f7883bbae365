"""RoPE of 32 query and 8 key heads of 128: each way reads and writes the heads once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere
from transformers.models.qwen3 import modeling_qwen3

from fuseplug import manager
from fuseplug_rope.reference import rope as reference

from ..contest.aims import moving_bytes
from ..contest.peers import compiled, of, searching
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
    Op,
    Problem,
    normal,
)

apply_rotary_pos_emb = modeling_qwen3.apply_rotary_pos_emb
rotate_pairs = modeling_cohere.apply_rotary_pos_emb


class Shape(NamedTuple):
    batch: int
    sequence: int
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128


def problem(shape: Shape, kind: Kind, *, pairs: bool = False) -> Problem:
    """The two halves of a head rotate together, or, for *pairs*, neighbouring elements, as in Cohere's models."""
    batch, sequence, heads, key_heads, head_dim = shape

    def rows(count: int) -> Tensor:
        """*count* heads, with the memory layout that projections give them."""
        return normal(kind, batch, sequence, count, head_dim).transpose(1, 2)

    frequencies = torch.logspace(0, -6, head_dim // 2, device=kind.device)
    angles = torch.outer(torch.arange(sequence, device=kind.device), frequencies)
    angles = (angles.repeat_interleave(2, 1) if pairs else angles.repeat(1, 2))[None]
    cos, sin = angles.cos().to(kind.dtype), angles.sin().to(kind.dtype)
    moved = 2 * kind.dtype.itemsize * batch * sequence * (heads + key_heads) * head_dim
    return Problem(
        f"{batch} × {sequence}",
        (rows(heads).requires_grad_(), rows(key_heads).requires_grad_(), cos, sin),
        (rows(heads), rows(key_heads)),
        on_heads(partial(reference, variant="interleaved-wide") if pairs else reference),
        {FORWARD: Least(moved), BACKWARD: Least(moved), BOTH: Least(2 * moved)},
    )


def on_heads(function: Callable[..., tuple[Tensor, ...]]) -> Function:
    """*function* with tables that all heads share, as in `apply_rotary_pos_emb`."""
    return lambda q, k, cos, sin: function(q, k, cos.unsqueeze(1), sin.unsqueeze(1))


def eager(_: Sequence[Tensor]) -> Function:
    return apply_rotary_pos_emb


def applied(arguments: Sequence[Tensor], *, pairs: bool = False) -> Function:
    module = (RotatesPairs if pairs else Rotates)().to(arguments[0])
    assert manager.apply_all(module).report.fused, "nothing was fused"
    return module


class Rotates(nn.Module):
    """Looks up the rotary function as an attention does.

    The projection is not called. It is there because a model is planned for the dtypes of its parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(1, 1)

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)


class RotatesPairs(Rotates):
    """The same for pairs."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_pairs(q, k, cos, sin)


OP = Op(
    "rope",
    problem,
    shapes=(Shape(1, 32768), Shape(8, 2048), Shape(1, 2048), Shape(4, 8192), Shape(8, 32768)),
    single=Shape(1, 1),
    tiny=(Shape(2, 3, 4, 2, 16),),
    contenders=(
        Contender(OURS, of("fuseplug_rope.backends.triton:rope", lambda f, *a: on_heads(f)(*a))),
        Contender(EAGER, eager),
        compiled(eager),
        searching(eager, lambda arguments: arguments[0].shape[2] == 32768),
        # Liger-Kernel writes over the heads that it rotates, both ways.
        Contender(LIGER, of("liger_kernel.ops:LigerRopeFunction", lambda f, *a: f.apply(*a)), writes=True),
    ),
    applied=Contender(f"{OURS}, applied", applied),
    aim=moving_bytes,
)
