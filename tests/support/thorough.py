"""What takes long and is left to ``nox -s thorough``: the same question, put to more of a kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Hashable, Iterable
from typing import Any

import pytest

from . import backends

thorough = pytest.mark.thorough


def thorough_on(*names: str) -> Callable[[Any], Any]:
    """A decorator of tests that take long on the backends *names*, and not on the others."""
    return thorough if backends.NAME in names else lambda test: test


def few_on(name: str, values: Iterable[Any], quick: int = 1) -> list[Any]:
    """*values* of a single name for ``parametrize``, on the backend *name* all but the first *quick* `thorough`."""
    values = list(values)
    return first_quick(map(pytest.param, values), quick) if name == backends.NAME else values


def first_quick(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """*values* for ``parametrize``, all but the first *quick* marked `thorough`.

    A tuple is a value for each of several names; wrap one that is the value of a single name in ``pytest.param``.
    """
    values = list(values)
    return [*values[:quick], *map(_marked, values[quick:])]


def quick_if(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """*values* for ``parametrize``, those that are not in *quick* marked `thorough`."""
    return [value if _named(value) in quick else _marked(value) for value in values]


def covering(rows: Iterable[Any], by: Callable[..., Iterable[Hashable]] | None = None) -> list[Any]:
    """*rows* for ``parametrize``, all but a few marked `thorough`: every value of every parameter occurs in these few.

    The next row is always the one with the most values that no row before it has, then the one with the most pairs of
    values, so that dtypes, say, take turns; of equal ones, the first.

    Args:
        rows: Tuples, or ``pytest.param`` of several values: `itertools.product` makes a grid of them.
        by: Called with the values of a row; what must occur, if not each of the values.
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
