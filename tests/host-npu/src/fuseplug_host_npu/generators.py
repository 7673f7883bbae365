"""Random numbers of the stand-in, drawn on the CPU from the state of the NPU's generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_STEP = 4
"""How far a draw moves the offset. torch_npu allows only multiples of 4, because Philox makes 4 numbers at a time."""


@contextlib.contextmanager
def drawing(generator: torch.Generator | None = None) -> Iterator[None]:
    """Inside, the CPU's default generator draws from the state of *generator*, which moves on.

    So ``torch.npu.manual_seed``, ``get_rng_state`` and ``set_rng_state`` have the same effect as on an NPU: the numbers
    depend on the seed and on the number of earlier draws. They are not the numbers that an NPU draws.

    Args:
        generator: A generator of the NPU; its default generator if ``None``.
    """
    if generator is None:
        generator = torch.npu.default_generators[torch.npu.current_device()]  # type: ignore[attr-defined]
    point = hash((generator.initial_seed(), generator.get_offset()))
    generator.set_offset(generator.get_offset() + _STEP)
    default = torch.default_generator
    kept = default.get_state()
    default.manual_seed(point % (1 << 63))
    try:
        yield
    finally:
        default.set_state(kept)
