"""The ways that branches took. Releases of Python report these differently; the tests cover the release that runs."""

import ast
import inspect
import sys
import threading

import pytest

from fuseplug_verify.verification.branches import Branches


def by_statement(x, way):
    if way:
        return -x
    return x


def by_expression(x, way):
    return -x if way else x


def by_comparison(x, way):
    if way is not False and x < 9:
        return -x
    return x


def span_of(function):
    """The span of the test of the only branch in *function*, or of the first part of the test, as readings give it."""
    tree = ast.parse(inspect.getsource(function))
    test = next(node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp))
    test = test.values[0] if isinstance(test, ast.BoolOp) else test
    above = function.__code__.co_firstlineno - 1
    return test.lineno + above, test.col_offset, test.end_lineno + above, test.end_col_offset


@pytest.fixture(params=[by_statement, by_expression, by_comparison])
def chosen(request):
    return request.param


@pytest.fixture
def branches(chosen):
    return Branches([chosen.__code__])


@pytest.mark.parametrize(
    ("runs", "one_sided"), [([], False), ([True], True), ([False], True), ([True, False], False), ([True, True], True)]
)
def test_every_run_counts_the_first_one_too(branches, chosen, runs, one_sided):
    for way in runs:
        with branches:
            chosen(3, way)
        branches.keep()
    assert branches.one_sided(__file__, span_of(chosen)) is one_sided


def test_what_another_thread_runs_meanwhile_does_not_count(branches, chosen):
    with branches:
        other = threading.Thread(target=chosen, args=(3, True))
        other.start()
        other.join()
        chosen(3, False)
    branches.keep()
    assert branches.one_sided(__file__, span_of(chosen))


def test_a_run_that_is_not_kept_does_not_count(branches, chosen):
    for way in (True, False):
        with branches:
            chosen(3, way)
    branches.keep()
    assert branches.one_sided(__file__, span_of(chosen))


def test_a_tracer_goes_on(branches, chosen):
    lines = []

    def tracer(frame, event, _arg):
        if frame.f_code is chosen.__code__ and event == "line":
            lines.append(frame.f_lineno)
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with branches:
            chosen(3, True)
        branches.keep()
        chosen(3, True)
    finally:
        sys.settrace(before)
    assert lines
    assert branches.one_sided(__file__, span_of(chosen))
