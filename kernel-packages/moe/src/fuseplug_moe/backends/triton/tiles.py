"""The sizes of the products' tiles: one table, measured on an H200 in bfloat16.

A grouped product reads the matrix of each expert once for every tile of its rows. Below some 300 rows an expert, these
reads bound its speed (990 TFLOP/s of bfloat16 over 3.35 TB/s are 295 operations a byte, and each row needs one
operation for each byte); above, the tensor cores do.

- *Few rows*: the smallest height that a tensor core takes. Tiles are narrow, so that every multiprocessor has a program
  even when one token chooses eight experts (2 · 768 columns: 24 tiles each). They are deep, so that enough bytes are in
  flight: 3 of the 4 stages of 64 · 128 · 2 bytes are 48 KB for each program, where 18 KB for each multiprocessor cover
  700 ns of latency.
- *Many rows*: 128 · 256 on two warp groups, with 128 accumulator registers for each thread: the largest tile that
  leaves room for an epilogue. A step of depth 64 loads 48 KB; three take 144 of the 227 KB, four take 192.

On a GPU with less shared memory, tiles are narrower and stages fewer. No tensor core keeps the precision of float32, so
its tiles are as large as fits into registers.

Triton computes products with gates. torch's own grouped matmul is for bfloat16 only, and cannot gather or gate: around
it, ``2 · hidden + 4 · inner`` more elements are moved for each slot. The gradients of matrices need no gate, so torch
computes them where it can (see `weight_gradient`). Elsewhere small tiles were fastest: with several on a
multiprocessor, one is written while another is multiplied.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fuseplug_backends.triton import shared_memory

_HEIGHTS = {16: 8, 32: 16, 64: 64}
"""For each height of tiles, the most rows of an expert on average. A second tile reads the matrix once more.

With 32 rows on average, tiles of height 64 take 335 µs and those of height 32 take 355 µs (128 experts), or 700 and 900
(8 large experts).
"""

_DEEP = 2048
"""The terms of a sum from which on one more stage gains: with 4096 it gains a tenth, with 768 it loses a tenth."""

_CACHED = 16 << 20
"""The most bytes of a matrix that stays cached while all rows of its expert are multiplied: an H100 has 50 MB."""

GROUP = 8
"""The number of tiles of rows that are computed before the next columns, where the order matters."""


class Shape(NamedTuple):
    """The tile of a product, ``(height, depth) · (depth, width)``, and how it is computed."""

    height: int
    width: int
    depth: int
    warps: int
    stages: int

    def compiled_in(self, terms: int, columns: int, itemsize: int) -> dict[str, int]:
        """The constants of a program that multiplies matrices with that many *terms* and *columns*."""
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
    """The number of rows in a tile if *slots* are spread evenly over *experts*: 16, 32, 64 or 128."""
    return next((size for size, most in _HEIGHTS.items() if slots <= most * experts), 128)


def tiles(slots: int, experts: int, rows: int) -> int:
    """The largest possible number of tiles of *rows* rows, including those of experts elsewhere."""
    return slots // rows + min(slots, experts + 1)


def group(terms: int, columns: int, itemsize: int) -> int:
    """How many tiles of rows are computed before the next columns of a matrix with that many *terms* and *columns*.

    If the matrix is larger than a cache, programs that run at the same time then read the same columns: 3.3 ms instead
    of 4.2 with 4096 terms and 28,672 columns. Smaller matrices are read from the cache in any order.
    """
    return GROUP if terms * columns * itemsize > _CACHED else 1


@functools.lru_cache
def product(rows: int, columns: int, terms: int, itemsize: int, device: torch.device) -> Shape:
    """The tile of rows times matrices with that many *columns*, each result a sum of that many *terms*."""
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
    """*size*, or the power of two that holds fewer *columns*; at least sixteen, as tensor cores require."""
    return min(size, max(16, power_of_two(columns)))


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below *size*."""
    return 1 << (size - 1).bit_length()
