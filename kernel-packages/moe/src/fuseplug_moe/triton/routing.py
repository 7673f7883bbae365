"""The slots, pairs of token and expert, sorted by expert on the device, in one launch and without the host.

A *route* is one tensor of int32, in three parts:

- ``(slots,)``: the slot of each sorted row, those of one expert as the tokens come, those of experts elsewhere last;
- ``(experts,)``: where the rows of each expert end;
- ``(tiles, 3)``: expert, first row and end of the rows for each tile of a product. What is left of the table has no
  rows; tiles of experts elsewhere have the number of experts for theirs.

torch's stable sort, its inverse, the counts and their sum are some ten launches and twenty bytes a slot in each. Here
each expert has a program that reads every index twice, from the cache: a slot is 16 bytes of it for each expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuseplug.triton import operation

from . import tiles

_BLOCK = 4096
_SMALL_BLOCK = 256
"""Slots that a program looks at together, and how many for few of them."""


def _results(index: Tensor, experts: int) -> Tensor:
    slots = index.shape[0] * index.shape[1]
    return index.new_empty(slots + experts + 3 * (slots // 16 + experts + 1), dtype=torch.int32)


@operation("fuseplug_moe::sort(Tensor index, int experts) -> Tensor", _results)
def sort(route: Tensor, index: Tensor, experts: int) -> None:
    """The route of *index*, ``(tokens, k)``, contiguous, for as many *experts*."""
    slots = index.numel()
    height = tiles.height(slots, experts)
    _sort[(experts + 1,)](
        route,
        index,
        slots,
        tiles.tiles(slots, experts, height),
        experts,
        HEIGHT=height,
        BLOCK=_SMALL_BLOCK if slots <= _SMALL_BLOCK else _BLOCK,
        BINS=max(32, tiles.power_of_two(experts + 1)),
    )


@triton.jit(do_not_specialize=["slots", "tiles"])
def _sort(route, index, slots, tiles, experts, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, slots, BLOCK):
        at = first + tl.arange(0, BLOCK)
        counts += tl.histogram(_chosen(index, at, slots, experts), BINS, mask=at < slots)
    first_row = tl.sum(tl.where(bins < expert, counts, 0))
    rows = tl.sum(tl.where(bins == expert, counts, 0))

    row = first_row
    for first in range(0, slots, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = (_chosen(index, at, slots, experts) == expert) & (at < slots)
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(route + row + rank - 1, at, mask=mine)
        row += tl.sum(mine.to(tl.int32))

    tl.store(route + slots + expert, first_row + rows, mask=expert < experts)
    heights = (counts + HEIGHT - 1) // HEIGHT
    before = tl.sum(tl.where(bins < expert, heights, 0))
    # The last program fills the table: what it writes after its own tiles starts behind its rows.
    own = tl.where(expert < experts, (rows + HEIGHT - 1) // HEIGHT, tiles - before)
    for first in range(0, own, 64):
        tile = first + tl.arange(0, 64)
        entry = route + slots + experts + 3 * (before + tile)
        tl.store(entry, expert, mask=tile < own)
        tl.store(entry + 1, first_row + tile * HEIGHT, mask=tile < own)
        tl.store(entry + 2, first_row + rows, mask=tile < own)


@triton.jit
def _chosen(index, at, slots, experts):
    chosen = tl.load(index + at, mask=at < slots, other=0)
    return tl.where((chosen >= 0) & (chosen < experts), chosen, experts).to(tl.int32)


def counts(route: Tensor, index: Tensor, experts: int) -> Tensor:
    """How many rows each expert has, ``(experts,)``, by the *route* of *index*."""
    ends = route[index.numel() :][:experts]
    return torch.diff(ends, prepend=ends.new_zeros(1))
