"""Times contenders by turns, so that a busy moment of the machine affects all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SHORT = 2e-3
"""Calls of fewer seconds are timed several at a time; one alone would measure the clock."""

_MOST_AT_A_TIME = 50

_LEAST = 3
"""The least number of turns whose median one busy moment does not change."""


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
    """Time each contender *repeats* times. In each turn, all contenders run one after the other, in a new order.

    A contender that fills the caches or frees much memory slows down the next one. In a fixed order, the next one
    would always be the same.

    Args:
        contenders: The functions to call, by name. Each returns when its work is done.
        repeats: How many turns count.
        settle: Called before each measurement, to finish work of the previous contender that is still under way.
        warm_up: How many turns come before these and do not count.
        at_a_time: How many calls a contender makes in its turn at least; short calls are made more often.
        after_turn: Called after each turn with the number of turns that counted so far.
        within: Seconds after which no turn begins, once *least* turns have counted.
        least: How many turns count at least. The default is three, or one if a single call takes longer than *within*.

    Returns:
        For each contender, the microseconds of a call in each turn.
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
    """Median, quartiles, maximum and number of *values*, which must be at least two."""
    low, _, high = statistics.quantiles(values, n=4)
    return {
        "median": statistics.median(values),
        "quartile_1": low,
        "quartile_3": high,
        "max": max(values),
        "n": len(values),
    }
