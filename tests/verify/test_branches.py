"""Which ways branches took, as each release of Python tells it. The release that runs the tests has one way to."""

import sys
import threading

import pytest

from fuseplug_verify.verification.branches import Branches


def chosen(x, way):
    return -x if way == 1 else x


def span_of(function):
    code = function.__code__
    return next((line, 0, line, 99) for line, *_ in code.co_positions() if line != code.co_firstlineno)


@pytest.fixture
def branches():
    return Branches([chosen.__code__])


@pytest.mark.parametrize(
    ("runs", "one_sided"), [([], False), ([1], True), ([2], True), ([1, 2], False), ([1, 1], True)]
)
def test_every_run_counts_the_first_one_too(branches, runs, one_sided):
    for way in runs:
        with branches:
            chosen(3, way)
        branches.keep()
    assert branches.one_sided(__file__, span_of(chosen)) is one_sided


def test_what_another_thread_runs_meanwhile_does_not_count(branches):
    with branches:
        other = threading.Thread(target=chosen, args=(3, 1))
        other.start()
        other.join()
        chosen(3, 2)
    branches.keep()
    assert branches.one_sided(__file__, span_of(chosen))


def test_a_run_that_is_not_kept_does_not_count(branches):
    for way in (1, 2):
        with branches:
            chosen(3, way)
    branches.keep()
    assert branches.one_sided(__file__, span_of(chosen))


def test_a_tracer_goes_on(branches):
    lines = []

    def tracer(frame, event, _arg):
        if frame.f_code is chosen.__code__ and event == "line":
            lines.append(frame.f_lineno)
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with branches:
            chosen(3, 1)
        branches.keep()
        chosen(3, 1)
    finally:
        sys.settrace(before)
    assert lines
    assert branches.one_sided(__file__, span_of(chosen))
