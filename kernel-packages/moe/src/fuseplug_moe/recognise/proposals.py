"""What all proposals for experts have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fuseplug import Adapter, Example, Proposal, Target


def inexact(
    adapters: Sequence[Adapter],
    example: Callable[[Any, int, torch.Generator], Example],
    mixes: Iterable[Any],
    hidden: int = 1,
    **others: Any,
) -> Proposal:
    """A proposal for experts, whose original matrix products add in an order of their own.

    If kernels gain from some number of tokens on, *hidden* is the width of the input. *others* are attributes of
    `Proposal`; the target is the forward unless *others* name one.
    """
    return Proposal(
        adapters=tuple(adapters),
        example=example,
        mixes=tuple(mixes),
        roundings=16.0,
        working_roundings=64.0,
        exact=False,
        work=1 / hidden,
        **{"target": Target(), **others},
    )
