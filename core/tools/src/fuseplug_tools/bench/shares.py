"""Where the time of a call goes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

_CALLS = 3
"""Calls that are profiled together, because the time of a single call is a matter of chance."""


class Share(NamedTuple):
    """One operation of torch.

    Attributes:
        operation: Its name, as the profiler has it.
        before: Its time in the unfused model, as a share of the unfused model's time, from 0 to 1.
        after: Its time in the fused model, as a share of the same time, so that both shares can be compared.
    """

    operation: str
    before: float
    after: float


def shares(unfused: Callable[[], Any], fused: Callable[[], Any], device_type: str, most: int = 10) -> list[Share]:
    """The operations that take most of the time of *unfused* or *fused*, the largest share first.

    Args:
        unfused: Calls the unfused model. This call was made before.
        fused: Makes the same call of the fused model. This call was made before, too.
        device_type: Where the work is done; the time there counts.
        most: How many operations are listed; the rest is added up as one more, ``"others"``.
    """
    before, after = (_times(run, device_type) for run in (unfused, fused))
    whole = sum(before.values()) or 1.0
    names = sorted(before.keys() | after.keys(), key=lambda name: -max(before.get(name, 0), after.get(name, 0)))

    def share(operation: str, of: Sequence[str]) -> Share:
        one, other = (sum(times.get(name, 0.0) for name in of) / whole for times in (before, after))
        return Share(operation, one, other)

    told = [share(name, [name]) for name in names[:most]]
    return [*told, share("others", names[most:])] if len(names) > most else told


def _times(run: Callable[[], Any], device_type: str) -> dict[str, float]:
    activities: Sequence[ProfilerActivity] = [ProfilerActivity.CPU]
    activity = {"cuda": "CUDA", "xpu": "XPU", "npu": "PrivateUse1"}.get(device_type, "")
    if hasattr(ProfilerActivity, activity):
        activities = [*activities, getattr(ProfilerActivity, activity)]
    with profile(activities=activities) as profiler:
        for _ in range(_CALLS):
            run()
    time = "self_cpu_time_total" if device_type == "cpu" else "self_device_time_total"
    return {event.key: float(getattr(event, time)) for event in profiler.key_averages() if getattr(event, time) > 0}
