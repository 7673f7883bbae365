"""From how many elements on a kernel is used: smaller calls are the original's, which is faster there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .contract import Adapter, Use
from .hookspecs import BaseKernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Gains:
    """Numbers of elements of the main input, for each of `DTYPES`.

    Attributes:
        training: For calls whose main input requires gradients.
        inference: For all others.
    """

    training: tuple[int, ...]
    inference: tuple[int, ...]

    def __bool__(self) -> bool:
        """Whether there is any call that is too small."""
        return any(self.training) or any(self.inference)

    def why_not(self, x: torch.Tensor) -> str:
        """What is said where *x*, the main input, is too small."""
        numbers = dict(zip(DTYPES, self.training if x.requires_grad else self.inference, strict=True))
        return (
            f"it is too small to gain: the main input has {x.numel():,} elements, and the kernel is faster from "
            f"{numbers.get(x.dtype, 0):,} on"
        )

    def to_dict(self) -> dict[str, int]:
        """By kind of call (``"bfloat16 training"``); empty if there is no call that is too small."""
        kinds = [("training", self.training), ("inference", self.inference)] if self else []
        return {
            f"{str(dtype).removeprefix('torch.')} {kind}": number
            for kind, numbers in kinds
            for dtype, number in zip(DTYPES, numbers, strict=True)
        }


EVERY_SIZE = Gains((0,) * len(DTYPES), (0,) * len(DTYPES))


def gains_of(kernel: BaseKernel, adapter: Adapter, device_type: str, work: float) -> Gains:
    """What *kernel* says, in elements of the main input.

    Args:
        kernel: Whose `gains_from` is asked.
        adapter: What it computes.
        device_type: Where.
        work: As `Proposal.work`.

    Raises:
        TypeError: If it answers with something else than a number from 0 on.
    """
    return Gains(
        *(
            tuple([_asked(kernel, Use(adapter, device_type, dtype, gradients), work) for dtype in DTYPES])
            for gradients in (True, False)
        )
    )


def _asked(kernel: BaseKernel, use: Use, work: float) -> int:
    said = kernel.gains_from(use)
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        raise TypeError(f"gains_from() must give a number of elements, 0 or more; it gave {said!r} for {use.dtype}")
    return math.ceil(said / work)
