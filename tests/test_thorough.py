"""Which rows of a table are in the first half of the tests, the half that is not marked thorough."""

import itertools

import pytest
from support.thorough import covering, first_quick, quick_if, thorough


def quick(rows):
    """The values of the rows that are not marked."""
    values = [row.values if isinstance(row, type(pytest.param())) else row for row in rows]
    marked = [thorough.mark in getattr(row, "marks", ()) or thorough in getattr(row, "marks", ()) for row in rows]
    return [row for row, left in zip(values, marked, strict=True) if not left]


def test_the_first_half_of_a_grid_has_every_value_in_the_fewest_rows_and_in_turns():
    grid = list(itertools.product("abcd", (1, 2), ("x", "y")))
    rows = covering(grid)
    assert len(rows) == len(grid)
    assert quick(rows) == [("a", 1, "x"), ("b", 2, "y"), ("c", 1, "y"), ("d", 2, "x")]


def test_what_must_occur_may_be_told():
    rows = covering([("a", 1), ("b", 1), ("c", 2)], by=lambda letter, number: [number])
    assert quick(rows) == [("a", 1), ("c", 2)]


def test_names_marks_and_order_of_rows_are_kept():
    mark = pytest.mark.skip
    rows = covering([pytest.param("a", [1], id="first"), pytest.param("a", [1], id="again", marks=mark)])
    assert [row.id for row in rows] == ["first", "again"]
    assert mark in rows[1].marks
    assert quick(rows) == [("a", [1])]


def test_the_first_or_the_named_ones_are_in_the_first_half():
    assert quick(first_quick([pytest.param("a"), pytest.param("b")])) == [("a",)]
    assert quick(quick_if([pytest.param("a"), pytest.param("b")], {"b"})) == [("b",)]
