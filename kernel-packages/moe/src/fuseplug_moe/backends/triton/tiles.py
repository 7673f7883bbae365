"""How large the tiles of the products are: one table, from reasoning about an H100, for who has one to tune.

A grouped product reads the matrix of each expert once for every tile of its rows. Below some 300 rows an expert it is
bound by these reads (990 TFLOP/s of bfloat16 over 3.35 TB/s are 295 operations a byte, and a row makes one of each
byte), above by the tensor cores.

- *Few rows*: the least height that a tensor core takes, narrow tiles so that there is a program for every
  multiprocessor even when one token chooses eight experts (2 · 768 columns: 24 each), and deep ones, so that enough
  bytes are in flight: 3 of the 4 stages of 64 · 128 · 2 bytes are 48 KB of each program, where 18 KB of each
  multiprocessor cover 700 ns of latency.
- *Many rows*: 128 · 256 on two warp groups, 128 registers of accumulator for each thread, the largest that leaves room
  for an epilogue. A step of depth 64 brings 48 KB; three are 144 of the 227 KB.

Where a GPU has less memory, tiles are narrower and stages fewer. In float32 there are no tensor cores that keep its
precision, so tiles are what fits registers.

All products are Triton's. torch's own grouped matmul is for bfloat16 alone, and cannot gather or gate: around it
``2 · hidden + 4 · inner`` more elements are moved for each slot. Which wins for many rows, a GPU has to say.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """The tile of a product, ``(height, depth) · (depth, width)``, and how it is computed."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int


@functools.lru_cache
def height(slots: int, experts: int) -> int:
    """How many rows of an expert a tile has, if *slots* are spread evenly over *experts*: 16, 32, 64 or 128."""
    average = -(-slots // experts)
    return next((size for size in (16, 32, 64) if average <= size), 128)


def tiles(slots: int, experts: int, rows: int) -> int:
    """The most tiles of *rows* rows there can be, those of experts elsewhere among them."""
    return slots // rows + min(slots, experts + 1)


@functools.lru_cache
def product(rows: int, columns: int, itemsize: int, device: torch.device) -> Shape:
    """The tile of rows times matrices that have *columns* columns."""
    if itemsize == 4:
        return Shape(rows, _at_most(64, columns), 32, 4 if rows <= 64 else 8, 2)
    width, depth, warps, stages = {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (128, 64, 4, 4), 128: (256, 64, 8, 3)}[
        rows
    ]
    if (rows + width) * depth * itemsize * stages > room(device):
        width = min(width, 128)
    stages = min(stages, room(device) // ((rows + width) * depth * itemsize))
    return Shape(rows, _at_most(width, columns), depth, warps, max(stages, 1))


@functools.lru_cache
def gradient(rows: int, columns: int, itemsize: int, device: torch.device) -> Shape:
    """The tile of the gradient of matrices ``(rows, columns)``; its depth is along the rows of an expert."""
    if itemsize == 4:
        return Shape(_at_most(64, rows), _at_most(64, columns), 16, 4, 2)
    # Which rows are read is read itself, which takes two of the stages: three are left for the rows.
    stages = min(3, room(device) // (256 * 64 * itemsize)) + 2
    return Shape(_at_most(128, rows), _at_most(128, columns), 64, 8, stages)


@functools.lru_cache
def room(device: torch.device) -> int:
    """The bytes of shared memory that a program may have: 227 KB on an H100, 99 on an L40S, 64 on an MI300."""
    if device.type != "cuda":
        return 227 << 10
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 << 10)


def _at_most(size: int, columns: int) -> int:
    """*size*, or for fewer columns the power of two that holds them: sixteen at least, as tensor cores want."""
    return min(size, max(16, power_of_two(columns)))


def power_of_two(size: int) -> int:
    """The least one that is not below *size*."""
    return 1 << (size - 1).bit_length()
