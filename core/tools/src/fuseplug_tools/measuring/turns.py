"""Contenders timed by turns, so that a busy moment of the machine meets them all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SHORT = 2e-3
"""Seconds below which a call is timed several at a time, or the clock is what is measured."""

_MOST_AT_A_TIME = 50

_LEAST = 3
"""Turns whose median one busy moment does not move."""


def by_turns(
    contenders: Mapping[str, Callable[[], Any]],
    repeats: int,
    settle: Callable[[], Any] | None = None,
    *,
    warm_up: int = 3,
    at_a_time: int = 1,
    after_turn: Callable[[int], Any] | None = None,
    within: float | None = None,
    least: int | None = None,
) -> dict[str, list[float]]:
    """Time each contender *repeats* times, one after the other in each turn, in an order of its own.

    Whoever comes after a contender that fills the caches or frees much memory pays for it: in one order for all turns
    that is always the same one.

    Args:
        contenders: What to call, by name. Each returns when its work is done.
        repeats: How many turns count.
        settle: Called before each call that is timed, for what is still under way from the one before.
        warm_up: How many turns go before these, and do not count.
        at_a_time: How many calls a contender makes in its turn, at the least; more of them if they are short.
        after_turn: Called after each turn with how many counted so far.
        within: Seconds after which no turn is begun, once *least* have counted.
        least: By default three; or one, if a single call takes longer than *within*.

    Returns:
        The microseconds of a call, for each contender one number a turn.
    """
    first = next(iter(contenders.values()))
    first()
    start = time.perf_counter()
    first()
    took = time.perf_counter() - start
    at_a_time = max(at_a_time, min(_MOST_AT_A_TIME, int(_SHORT / took)))
    if least is None:
        least = _LEAST if within is None or took < within else 1
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    beginning, order, shuffling = 0.0, list(contenders.items()), random.Random(0)  # noqa: S311 - no secret
    for turn in range(-warm_up, repeats):
        if within is not None and turn >= 0:
            beginning = beginning or time.perf_counter()
            if turn >= least and time.perf_counter() - beginning > within:
                break
        shuffling.shuffle(order)
        for name, run in order:
            if settle is not None:
                settle()
            start = time.perf_counter()
            for _ in range(at_a_time):
                run()
            if turn >= 0:
                samples[name].append((time.perf_counter() - start) / at_a_time * 1e6)
        if after_turn is not None:
            after_turn(max(0, turn + 1))
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, worst and number of *values*, two at least."""
    low, _, high = statistics.quantiles(values, n=4)
    return {
        "median": statistics.median(values),
        "quartile_1": low,
        "quartile_3": high,
        "max": max(values),
        "n": len(values),
    }
