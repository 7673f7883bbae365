"""What takes long and is left to ``nox -s thorough``: the same question, put to more of a kind."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def first_quick(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """*values* for ``parametrize``, all but the first *quick* marked `thorough`.

    A tuple is a value for each of several names; wrap one that is the value of a single name in ``pytest.param``.
    """
    values = list(values)
    return [*values[:quick], *map(_marked, values[quick:])]


def quick_if(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """*values* for ``parametrize``, those that are not in *quick* marked `thorough`."""
    return [value if _named(value) in quick else _marked(value) for value in values]


def _named(value: Any) -> Any:
    return value.values[0] if isinstance(value, type(pytest.param())) else value


def _marked(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, id=value.id, marks=[*value.marks, thorough])
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=thorough)
