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
        route: What a backward keeps of the routing.
        count: Gives ``(experts,)`` integers on the device, how many rows each has by *route*; eight bytes each are
            copied.
    """

    def __init__(self, route: Tensor, count: Callable[[Tensor], Tensor]) -> None:
        self._route, self._count, self._event, counts = route, count, None, count(route)
        if counts.device.type == "cpu":
            self._counts = counts
            return
        # From pageable memory the host would wait for the copy.
        self._counts = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
        self._counts.copy_(counts, non_blocking=True)
        self._event = torch.get_device_module(counts.device).Event()
        self._event.record()

    def positive(self, route: Tensor) -> list[bool]:
        """Whether each count is more than zero, by *route*, as the backward has it.

        If a checkpoint has computed that anew, it may be another: then it is asked, and the host waits.
        """
        if route.data_ptr() != self._route.data_ptr():
            return HostCounts(route, self._count).positive(route)
        if self._event is not None:
            self._event.synchronize()
        return [count > 0 for count in self._counts.tolist()]


def host_counts_of(experts: Experts, route: Tensor, count: Callable[[Tensor], Tensor]) -> HostCounts | None:
    """What a backward must know on the host, as for `HostCounts`: which experts get no gradient at all.

    Returns:
        ``None`` if it need not know.
    """
    listed = [matrices for matrices in (experts.gate_up, experts.up, experts.down) if not isinstance(matrices, Tensor)]
    if experts.idle == "zero" or not any(recording(*matrices) for matrices in listed if matrices is not None):
        return None
    return HostCounts(route, count)
