"""Marks tests that take long and are left to ``nox -s thorough``: the same question, put to more cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any

import pytest

from . import backends

thorough = pytest.mark.thorough


def thorough_on(*names: str) -> Callable[[Any], Any]:
    """A decorator for tests that take long on the backends *names*, but not on others."""
    return thorough if backends.NAME in names else lambda test: test


def few_on(name: str, values: Iterable[Any], quick: int = 1) -> list[Any]:
    """*values* of one name for ``parametrize``; on the backend *name*, all but the first *quick* marked `thorough`."""
    values = list(values)
    return first_quick(map(pytest.param, values), quick) if name == backends.NAME else values


def first_quick(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """*values* for ``parametrize``, all but the first *quick* marked `thorough`.

    A tuple has a value for each of several names; wrap a tuple that is the value of one name in ``pytest.param``.
    """
    values = list(values)
    return [*values[:quick], *map(_marked, values[quick:])]


def quick_if(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """*values* for ``parametrize``, all but those in *quick* marked `thorough`."""
    return [value if _named(value) in quick else _marked(value) for value in values]


def covering(rows: Iterable[Any], by: Callable[..., Iterable[Hashable]] | None = None) -> list[Any]:
    """*rows* for ``parametrize``, all but a few marked `thorough`: every value of every parameter occurs in these few.

    The next of these few is always the row with the most values that none of them has yet. Among equals, it is the row
    with the most new pairs of values, so that dtypes, say, take turns; then the first.

    Args:
        rows: Tuples, or ``pytest.param`` of several values: `itertools.product` makes a grid of them.
        by: Called with the values of a row; returns what must occur, if that is not each of the values.
    """
    rows = list(rows)
    has = [_told_apart(by(*_values(row)) if by else _values(row)) for row in rows]
    singles = [set(values) for values in has]
    pairs = [set(itertools.combinations(values, 2)) for values in has]
    quick: list[int] = []
    while missing := set().union(*singles) - set().union(*(singles[chosen] for chosen in quick)):
        met = set().union(*(pairs[chosen] for chosen in quick))
        best = max(range(len(rows)), key=lambda at: (len(singles[at] & missing), len(pairs[at] - met), -at))
        quick.append(best)
    return [row if at in quick else _marked(row) for at, row in enumerate(rows)]


def _values(row: Any) -> tuple[Any, ...]:
    return row.values if isinstance(row, type(pytest.param())) else row


def _told_apart(values: Iterable[Any]) -> list[tuple[int, Hashable]]:
    return [(place, value if isinstance(value, Hashable) else repr(value)) for place, value in enumerate(values)]


def _named(value: Any) -> Any:
    return value.values[0] if isinstance(value, type(pytest.param())) else value


def _marked(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, thorough])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=thorough)
