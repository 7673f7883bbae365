"""How large the tiles of the products are: one table, measured on an H200 in bfloat16.

A grouped product reads the matrix of each expert once for every tile of its rows. Below some 300 rows an expert it is
bound by these reads (990 TFLOP/s of bfloat16 over 3.35 TB/s are 295 operations a byte, and a row makes one of each
byte), above by the tensor cores.

- *Few rows*: the least height that a tensor core takes, narrow tiles so that there is a program for every
  multiprocessor even when one token chooses eight experts (2 · 768 columns: 24 each), and deep ones, so that enough
  bytes are in flight: 3 of the 4 stages of 64 · 128 · 2 bytes are 48 KB of each program, where 18 KB of each
  multiprocessor cover 700 ns of latency.
- *Many rows*: 128 · 256 on two warp groups, 128 registers of accumulator for each thread, the largest that leaves room
  for an epilogue. A step of depth 64 brings 48 KB; three are 144 of the 227 KB, four 192.

Where a GPU has less memory, tiles are narrower and stages fewer. In float32 there are no tensor cores that keep its
precision, so tiles are what fits registers.

Products with gates are Triton's. torch's own grouped matmul is for bfloat16 alone, and cannot gather or gate: around it
``2 · hidden + 4 · inner`` more elements are moved for each slot. The gradients of matrices need no gate, and are
torch's where it has them (see `weight_gradient`). Elsewhere small tiles were fastest: with several on a multiprocessor,
one is written while another is multiplied.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fuseplug_backends.triton import shared_memory

_HEIGHTS = {16: 8, 32: 16, 64: 64}
"""The most rows that an expert may have on average for tiles of a height. A second tile reads its matrix once more.

With 32 rows on average, tiles of 64 take 335 µs and those of 32 355 (128 experts), or 700 and 900 (8 large ones).
"""

_DEEP = 2048
"""Terms of a sum from which one more stage gains: a tenth with 4096; with 768 it loses a tenth."""

_CACHED = 16 << 20
"""Bytes of a matrix that stays in the cache while all rows of its expert are multiplied: an H100 has 50 MB."""

GROUP = 8
"""Tiles of rows that are computed before the next columns, where an order gains."""


class Shape(NamedTuple):
    """The tile of a product, ``(height, depth) · (depth, width)``, and how it is computed."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int

    def compiled_in(self, terms: int, columns: int, itemsize: int) -> dict[str, int]:
        """What programs are compiled for that multiply matrices of so many *terms* and *columns*."""
        return {
            "HEIGHT": self.height,
            "WIDTH": self.width,
            "DEPTH": self.depth,
            "GROUP": group(terms, columns, itemsize),
            "EVEN": terms % self.depth == 0 and columns % self.width == 0,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@functools.lru_cache
def height(slots: int, experts: int) -> int:
    """How many rows of an expert a tile has, if *slots* are spread evenly over *experts*: 16, 32, 64 or 128."""
    return next((size for size, most in _HEIGHTS.items() if slots <= most * experts), 128)


def tiles(slots: int, experts: int, rows: int) -> int:
    """The most tiles of *rows* rows there can be, those of experts elsewhere among them."""
    return slots // rows + min(slots, experts + 1)


def group(terms: int, columns: int, itemsize: int) -> int:
    """How many tiles of rows are computed before the next columns of a matrix of so many *terms* and *columns*.

    Programs that run at the same time then read the same columns, where the whole matrix is more than a cache holds:
    3.3 ms for 4.2 with 4096 terms and 28,672 columns. Smaller ones are read from the cache in any order.
    """
    return GROUP if terms * columns * itemsize > _CACHED else 1


@functools.lru_cache
def product(rows: int, columns: int, terms: int, itemsize: int, device: torch.device) -> Shape:
    """The tile of rows times matrices that have *columns* columns, each result a sum of so many *terms*."""
    if itemsize == 4:
        return Shape(rows, _at_most(64, columns), 32, 4 if rows <= 64 else 8, 2)
    width, depth, warps = (64, 128, 4) if rows == 16 else (256, 64, 8)
    stages = 4 if rows < 128 or terms >= _DEEP else 3
    room = shared_memory(device)
    if (rows + width) * depth * itemsize * min(stages, 3) > room:
        width = min(width, 128)
    stages = min(stages, room // ((rows + width) * depth * itemsize))
    return Shape(rows, _at_most(width, columns), depth, warps, max(stages, 1))


@functools.lru_cache
def gradient(rows: int, columns: int, itemsize: int, device: torch.device) -> Shape:
    """The tile of the gradient of matrices ``(rows, columns)``; its depth is along the rows of an expert."""
    if itemsize == 4:
        return Shape(_at_most(64, rows), _at_most(64, columns), 16, 4, 2)
    stages = min(4, shared_memory(device) // (256 * 32 * itemsize))
    return Shape(_at_most(128, rows), _at_most(128, columns), 32, 4, stages)


def _at_most(size: int, columns: int) -> int:
    """*size*, or for fewer columns the power of two that holds them: sixteen at least, as tensor cores want."""
    return min(size, max(16, power_of_two(columns)))


def power_of_two(size: int) -> int:
    """The least one that is not below *size*."""
    return 1 << (size - 1).bit_length()
