"""Times the device, by its own clock and with a cold cache, and the host, until a call is queued."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from fuseplug_tools.bench import by_turns

from .turns import Turn

Samples = dict[str, list[float]]
"""Microseconds, by contender."""

FEWEST, MOST = 7, 60
"""The fewest and the most turns of each contender."""

_WARM_UP = 3
_FILLS = 200
_LARGEST_CACHE = 256 << 20
"""The assumed bytes of a cache whose size torch does not tell."""

_LEEWAY = 200.0
"""Microseconds that the host may take beyond twice the time that the same call took in the warm-up.

Between calls of other contenders the host's caches are cold: a call that was queued in 20 µs then took up to 60.
"""


class DeviceClock:
    """Times contenders by turns, by the events of a GPU or an NPU, with a cold L2 cache.

    Args:
        device: A GPU or an NPU.
        ahead: Before each call, a buffer of twice the L2 cache is overwritten. With *ahead*, this takes long enough for
            the host to queue the whole call meanwhile, so that the device's time does not include the host's.
    """

    def __init__(self, device: torch.device, *, ahead: bool) -> None:
        self._ahead = ahead
        self._torch = torch.get_device_module(device)
        cache = getattr(self._torch.get_device_properties(device), "L2_cache_size", _LARGEST_CACHE)
        self._cold = torch.empty(max(2 * cache, 64 << 20), dtype=torch.int8, device=device)
        self._fill = statistics.median(self._microseconds(self._cold.zero_) for _ in range(10))

    def __call__(self, turns: Mapping[str, Turn], seconds: float) -> Samples:
        """Time *turns* until *seconds* are over, each `FEWEST` to `MOST` times."""
        fills = {name: self._warm_up(turn) for name, turn in turns.items()}
        samples: Samples = {name: [] for name in turns}
        end = time.monotonic() + seconds
        for number in range(MOST):
            if number >= FEWEST and time.monotonic() > end:
                break
            for name, turn in turns.items():
                state = turn.prepare()
                samples[name].append(self._microseconds(lambda turn=turn, state=state: turn.run(state), fills[name]))
        return samples

    def _warm_up(self, turn: Turn) -> int:
        for _ in range(_WARM_UP):
            state = turn.prepare()
            self._torch.synchronize()
            start = time.perf_counter()
            turn.run(state)
            queued = 1e6 * (time.perf_counter() - start)
        return min(_FILLS, 1 + int((_LEEWAY + 2 * queued) / self._fill)) if self._ahead else 1

    def _microseconds(self, run: Callable[[], object], fills: int = 0) -> float:
        start, end = (self._torch.Event(enable_timing=True) for _ in range(2))
        for _ in range(fills):
            self._cold.zero_()
        start.record()
        kept = run()
        end.record()
        end.synchronize()
        del kept  # not freed while it is timed
        return 1e3 * start.elapsed_time(end)


def host_clock(turns: Mapping[str, Turn], _seconds: float) -> Samples:
    """Run each turn once. For the benchmark's check of itself: these times mean nothing."""
    samples: Samples = {}
    for name, turn in turns.items():
        state = turn.prepare()
        start = time.perf_counter()
        turn.run(state)
        samples[name] = 2 * [1e6 * (time.perf_counter() - start)]  # `spread` needs two values
    return samples


def asking_clock(turns: Mapping[str, Turn], _seconds: float) -> Samples:
    """Time the host until a call is queued, without waiting for the device.

    Nothing is prepared between the calls, so the sizes must be such that overwritten arguments do not change the time.
    """
    calls: dict[str, Callable[[], object]] = {}
    for name, turn in turns.items():
        state = turn.prepare()
        calls[name] = lambda turn=turn, state=state: turn.run(state)
    return by_turns(calls, MOST, torch.cuda.synchronize)
