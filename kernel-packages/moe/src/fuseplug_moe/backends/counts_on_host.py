"""How many rows each expert has, sent to the host without waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuseplug_backends.differentiating import recording

from ..reference import Experts


class HostCounts:
    """Counts on their way from the device to the host.

    The copy is queued in the forward and asked for in the backward. By then the device has long passed it, and still
    has the rest of the forward and the loss to work on while the host goes on: nothing stands still.

    Args:
        counts: ``(experts,)`` integers on the device; eight bytes each are copied.
    """

    def __init__(self, counts: Tensor) -> None:
        self._event = None
        if counts.device.type == "cpu":
            self._counts = counts
            return
        # From pageable memory the host would wait for the copy.
        self._counts = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
        self._counts.copy_(counts, non_blocking=True)
        self._event = torch.get_device_module(counts.device).Event()
        self._event.record()

    def positive(self) -> list[bool]:
        """Whether each count is more than zero."""
        if self._event is not None:
            self._event.synchronize()
        return [count > 0 for count in self._counts.tolist()]


def host_counts_of(experts: Experts, count: Callable[[], Tensor]) -> HostCounts | None:
    """What a backward must know on the host: which experts get no gradient at all.

    Args:
        experts: The experts.
        count: Gives ``(experts,)`` integers on the device, how many rows each expert has.

    Returns:
        ``None`` if it need not know.
    """
    listed = [matrices for matrices in (experts.gate_up, experts.up, experts.down) if not isinstance(matrices, Tensor)]
    if experts.idle == "zero" or not any(recording(*matrices) for matrices in listed if matrices is not None):
        return None
    return HostCounts(count())
