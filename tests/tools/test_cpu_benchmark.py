"""The benchmark on the CPU calls every contender in the right way, and times none whose results are wrong."""

from dataclasses import replace

import pytest
from benchmarks.contest.problems import EAGER, OURS, Contender
from benchmarks.cpu import command, contests
from benchmarks.record import RESULTS
from support.thorough import thorough

QUICK = ("--dry-run", "--dtype", "float32", "--repeats", "2")


@thorough
@pytest.mark.parametrize("file", contests.CONTESTS)
def test_all_are_right_and_called_and_nothing_is_written(file, capsys):
    before = {path: path.stat().st_mtime for path in RESULTS.iterdir()}
    command.main([*QUICK, "--only", file])
    shown = capsys.readouterr().out
    assert all(contest.title in shown for contest in contests.CONTESTS[file])
    assert OURS in shown
    assert EAGER in shown
    assert {path: path.stat().st_mtime for path in RESULTS.iterdir()} == before


CONTEST = contests.CONTESTS["linear_attention"][0]
BASELINE = next(contender for contender in CONTEST.op.contenders if contender.name == EAGER)


def between(make, **changes):
    """A contest of two contenders: the one that *make* makes takes the place of ours, so that nothing is compiled."""
    return replace(CONTEST, op=replace(CONTEST.op, contenders=(Contender(OURS, make), BASELINE)), **changes)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda *arguments: 1.001 * contests.linear_attention.CONVOLUTION.eager(*arguments), "wrong: result 0 is"),
        (lambda *arguments: arguments[0].missing, "fails: AttributeError"),
    ],
)
def test_a_kernel_that_is_wrong_or_fails_ends_it(monkeypatch, wrong, why):
    monkeypatch.setitem(contests.CONTESTS, "linear_attention", [between(lambda _: wrong)])
    with pytest.raises(SystemExit, match=f"causal_conv1d at 70: {OURS} {why}"):
        command.main([*QUICK, "--only", "linear_attention"])


def test_a_table_says_how_many_times_as_fast_as_its_baseline(monkeypatch):
    monkeypatch.setattr(
        command, "by_turns", lambda runs, *_, **__: dict(zip(runs, ([10.0] * 3, [20.0] * 3), strict=True))
    )
    options = command.parse(QUICK)
    forward, _ = command.measure(between(BASELINE.make, memory=False), "float32", options)
    assert forward.title == "Causal convolution, 4096 channels, width 4, float32, forward, in ms"
    assert [(row[1], row[2]["median"], row[3]) for row in forward.rows] == [(OURS, 0.01, 2.0), (EAGER, 0.02, 1.0)]
