"""What all proposals for experts have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fuseplug import Adapter, Example, Proposal, Target

_FORWARD = Target()

_NO_TOKENS = ("token_idx.numel() == 0", "top_k_index.numel() == 0", "outputs", "len(outputs)")
_IMPOSSIBLE = ("expert_idx == self.num_experts", *_NO_TOKENS)
"""What loops over the experts that were hit ask, and what puts their outputs together. `one_hot` with so many classes
raises before the first is true; an expert that was hit has tokens; and calls without any tokens, where they differ, are
the original's."""


def inexact(
    adapters: Sequence[Adapter],
    example: Callable[[Any, int, torch.Generator], Example],
    mixes: Iterable[Any],
    covers: Sequence[str] = (),
    target: Target = _FORWARD,
    hidden: int = 1,
) -> Proposal:
    """A proposal for experts, whose own matrix products have an order of summation of their own.

    Where kernels gain from some number of tokens on, *hidden* is the width of the input.
    """
    return Proposal(
        target=target,
        adapters=tuple(adapters),
        example=example,
        mixes=tuple(mixes),
        roundings=16.0,
        working_roundings=64.0,
        covers=tuple(covers),
        exact=False,
        impossible=_IMPOSSIBLE,
        work=1 / hidden,
    )
