"""Sorts the slots, (token, expert) pairs, by expert on the device, in one to three launches and without the host.

A *route* is one tensor of int32, in three parts:

- ``(slots,)``: the slot of each sorted row, those of one expert in the order of the tokens, those of experts elsewhere
  last;
- ``(experts,)``: where the rows of each expert end;
- ``(tiles, 3)``: for each tile of a product, its expert, its first row, and where the expert's rows end. Unused entries
  of the table have no rows. Tiles of experts elsewhere have the number of experts in the place of their expert.

torch's stable sort, its inverse, the counts and their sum are some ten launches. One launch sorts a few slots: each
expert has a program that reads every index twice, from the cache. With many slots, that would be 16 bytes a slot for
each expert. So a launch before counts them in blocks, and a launch after puts them in their places: 16 bytes a slot in
all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuseplug_backends.triton import cached_launches, operation

from . import tiles

_FEW = 4096
"""The largest number of slots that one launch sorts."""

_BLOCK = 128
"""The number of slots that are ranked by comparing each with each."""

_COUNTS = 8192
"""The number of counts that a program adds up at once."""


def _results(index: Tensor, experts: int) -> Tensor:
    slots = index.shape[0] * index.shape[1]
    return index.new_empty(slots + experts + 3 * (slots // 16 + experts + 1), dtype=torch.int32)


@operation("fuseplug_moe::sort(Tensor index, int experts) -> Tensor", _results)
def sort(route: Tensor, index: Tensor, experts: int) -> None:
    """Make the route of *index*, ``(tokens, k)``, contiguous, for that many *experts*."""
    slots = index.numel()
    height = tiles.height(slots, experts)
    most = tiles.tiles(slots, experts, height)
    bins = max(32, tiles.power_of_two(experts + 1))
    if slots <= _FEW:
        block = 256 if slots <= 256 else 1024
        _sort[(experts + 1,)](route, index, slots, most, experts, HEIGHT=height, BLOCK=block, BINS=bins)
        return
    blocks = -(-slots // _BLOCK)
    counts = index.new_empty(blocks, experts + 1, dtype=torch.int32)
    rows = torch.empty_like(counts)
    _count[(blocks,)](counts, index, slots, experts, BLOCK=_BLOCK, BINS=bins)
    together = max(1, _COUNTS // bins)
    _place[(experts + 1,)](
        route, rows, counts, slots, most, blocks, experts, HEIGHT=height, BLOCKS=together, BINS=bins, num_warps=8
    )
    _scatter[(blocks,)](route, rows, index, slots, experts, BLOCK=_BLOCK)


@cached_launches
@triton.jit(do_not_specialize=["slots", "tiles"])
def _sort(route, index, slots, tiles, experts, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    expert = tl.program_id(0)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, slots, BLOCK):
        at = first + tl.arange(0, BLOCK)
        counts += tl.histogram(_chosen(index, at, slots, experts), BINS, mask=at < slots)
    row = _tabulate(route, expert, counts, slots, tiles, experts, HEIGHT, BINS)
    for first in range(0, slots, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = (_chosen(index, at, slots, experts) == expert) & (at < slots)
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(route + row + rank - 1, at, mask=mine)
        row += tl.sum(mine.to(tl.int32))


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _count(counts, index, slots, experts, BLOCK: tl.constexpr, BINS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    histogram = tl.histogram(_chosen(index, at, slots, experts), BINS, mask=at < slots)
    bins = tl.arange(0, BINS)
    tl.store(counts + tl.program_id(0) * (experts + 1) + bins, histogram, mask=bins <= experts)


@cached_launches
@triton.jit(do_not_specialize=["slots", "tiles", "blocks"])
def _place(
    route,
    rows,
    counts,
    slots,
    tiles,
    blocks,
    experts,
    HEIGHT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BINS: tl.constexpr,
):
    """Write where the rows of an expert start in each block."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)[None, :]
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)[:, None]
        mask = (block < blocks) & (bins <= experts)
        total += tl.sum(tl.load(counts + block * (experts + 1) + bins, mask=mask, other=0), 0)
    row = _tabulate(route, expert, total, slots, tiles, experts, HEIGHT, BINS)
    for first in range(0, blocks, BINS):
        block = first + tl.arange(0, BINS)
        at = block * (experts + 1) + expert
        count = tl.load(counts + at, mask=block < blocks, other=0)
        tl.store(rows + at, row + tl.cumsum(count, 0) - count, mask=block < blocks)
        row += tl.sum(count)


@cached_launches
@triton.jit(do_not_specialize=["slots"])
def _scatter(route, rows, index, slots, experts, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + place
    chosen = _chosen(index, at, slots, experts)
    before = (chosen[:, None] == chosen[None, :]) & (place[None, :] < place[:, None])
    row = tl.load(rows + tl.program_id(0) * (experts + 1) + chosen) + tl.sum(before.to(tl.int32), 1)
    tl.store(route + row, at, mask=at < slots)


@triton.jit
def _tabulate(route, expert, counts, slots, tiles, experts, HEIGHT: tl.constexpr, BINS: tl.constexpr):
    """Write where the rows of an expert end, and its tiles; return its first row."""
    bins = tl.arange(0, BINS)
    first_row = tl.sum(tl.where(bins < expert, counts, 0))
    end = first_row + tl.sum(tl.where(bins == expert, counts, 0))
    tl.store(route + slots + expert, end, mask=expert < experts)
    heights = (counts + HEIGHT - 1) // HEIGHT
    before = tl.sum(tl.where(bins < expert, heights, 0))
    # The last program fills the table: the entries after its own tiles start behind its rows.
    own_tiles = tl.where(expert < experts, (end - first_row + HEIGHT - 1) // HEIGHT, tiles - before)
    for first in range(0, own_tiles, 64):
        tile = first + tl.arange(0, 64)
        entry = route + slots + experts + 3 * (before + tile)
        tl.store(entry, expert, mask=tile < own_tiles)
        tl.store(entry + 1, first_row + tile * HEIGHT, mask=tile < own_tiles)
        tl.store(entry + 2, end, mask=tile < own_tiles)
    return first_row


@triton.jit
def _chosen(index, at, slots, experts):
    """The expert of each slot; for one elsewhere, the number of experts."""
    chosen = tl.load(index + at, mask=at < slots, other=0)
    return tl.where((chosen >= 0) & (chosen < experts), chosen, experts).to(tl.int32)


def counts(route: Tensor, index: Tensor, experts: int) -> Tensor:
    """The number of rows of each expert, ``(experts,)``, from the *route* of *index*."""
    ends = route[index.numel() :][:experts]
    return torch.diff(ends, prepend=ends.new_zeros(1))
