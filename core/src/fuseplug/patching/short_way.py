"""The way to the original of a call that is too small to gain: all of it in one code object.

While a model decodes, megabytes of weights are read between two calls, and what Python needs for a call is no longer in
the processor's caches. Each further function or object that a call touches then takes about a microsecond: see
`docs/concepts.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .guard import Guard, is_one_of
from .tally import Tally, listeners, running

_REPLACED = """\
def replaced(*a, **kwargs):
    if (
        not compiling()
        and not kwargs
        and {counts}
        and {too_small}
        and not listeners
    ):
        try:
            counted[id({counted_for})].original += 1
        except KeyError:
            pass
        else:
            return {now}(*a)
    return long_way(*a, **kwargs)
"""


def with_short_way(
    long_way: Callable[..., Any], guard: Guard, tally: Tally, counts: Sequence[int], *, bound: bool
) -> Callable[..., Any]:
    """*long_way* behind the short way, which does the same for small calls.

    Args:
        long_way: Takes every call. It takes those that nobody has counted yet, or that somebody listens to.
        guard: Says what is too small, and where the original is.
        tally: Where the calls are counted.
        counts: How many arguments a call has in which the main input is where *guard* looks for it.
        bound: Whether the first argument is the module for which calls are counted.
    """
    if not counts or (too_small := guard.too_small()) is None:
        return long_way
    code = _REPLACED.format(
        counts=is_one_of("len(a)", counts),
        too_small=too_small,
        counted_for="a[0]" if bound else "running.module",
        now=guard.now("a[0]"),
    )
    names = {
        **guard.names,
        # The cheapest question to which Dynamo knows the answer. What others trace with is no plain tensor.
        "compiling": torch.compiler.is_dynamo_compiling,
        "listeners": listeners,
        "counted": tally.counts,
        "running": running,
        "long_way": long_way,
    }
    exec(compile(code, "<way past a fused kernel>", "exec"), names)  # noqa: S102 - made from data, values by name
    replaced: Callable[..., Any] = names["replaced"]
    return replaced
