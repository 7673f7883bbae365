"""The number of rows of each expert, sent to the host without making it wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuseplug_backends.differentiating import recording

from ..reference import Experts


class HostCounts:
    """Counts on their way from the device to the host.

    The forward queues the copy, and the backward asks for it. By then the device has long passed the copy, and still
    has the rest of the forward and the loss to work on while the host goes on: neither stands still.

    Args:
        route: The part of the routing that a backward keeps.
        count: Returns the number of rows of each expert by *route*, ``(experts,)`` integers on the device; eight bytes
            each are copied.
    """

    def __init__(self, route: Tensor, count: Callable[[Tensor], Tensor]) -> None:
        self._route, self._count, self._event, counts = route, count, None, count(route)
        if counts.device.type == "cpu":
            self._counts = counts
            return
        # With pageable memory, the host would wait for the copy.
        self._counts = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
        self._counts.copy_(counts, non_blocking=True)
        self._event = torch.get_device_module(counts.device).Event()
        self._event.record()

    def positive(self, route: Tensor) -> list[bool]:
        """Whether each count is more than zero by *route*, the route that the backward has.

        If a checkpoint has computed the route anew, it may differ. Then its own counts are copied, and the host waits.
        """
        if route.data_ptr() != self._route.data_ptr():
            return HostCounts(route, self._count).positive(route)
        if self._event is not None:
            self._event.synchronize()
        return [count > 0 for count in self._counts.tolist()]


def host_counts_of(experts: Experts, route: Tensor, count: Callable[[Tensor], Tensor]) -> HostCounts | None:
    """The counts by which a backward knows, on the host, which experts get no gradient; arguments as for `HostCounts`.

    Returns:
        ``None`` if the backward need not know.
    """
    listed = [matrices for matrices in (experts.gate_up, experts.up, experts.down) if not isinstance(matrices, Tensor)]
    if experts.idle == "zero" or not any(recording(*matrices) for matrices in listed if matrices is not None):
        return None
    return HostCounts(route, count)
