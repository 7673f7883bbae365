"""Random numbers of the stand-in: drawn on the CPU, from the state of the NPU's generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_STEP = 4
"""By how much a draw moves the offset: torch_npu allows multiples of four only, as Philox makes four at a time."""


@contextlib.contextmanager
def drawing(generator: torch.Generator | None = None) -> Iterator[None]:
    """Inside, the CPU's default generator is where *generator*, of the NPU, was; that one is moved on.

    So ``torch.npu.manual_seed``, ``get_rng_state`` and ``set_rng_state`` have the effect that they have on an NPU: what
    is drawn depends on the seed and on how often was drawn before. The numbers are not those that an NPU draws.

    Args:
        generator: That of the NPU; its default one if ``None``.
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
