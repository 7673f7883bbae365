"""Ranks fuse the same or nothing, whichever comes first, and even if one does not come."""

import contextlib
import datetime
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed

from fuseplug_tools.fusing.ranks import Ranks

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="this torch has no distributed")
ROWS = ["model.norm forward: k, llama", "model.mlp forward: g, silu"]


class Impatient:
    """A store that raises if somebody waits in vain."""

    def __init__(self, store):
        self.set, self._store = store.set, store

    def wait(self, keys, patience):
        try:
            self._store.wait(keys, patience)
        except RuntimeError as error:
            raise AssertionError("it was waited for in vain") from error


@pytest.fixture
def ranks():
    """``ranks(count, key)`` makes *count* ranks in one process."""
    hashed = distributed.HashStore()

    def make(count=3, key="fuseplug/0", patience=30.0, environs=None, store=hashed):
        given = environs or [{}] * count
        wait = datetime.timedelta(seconds=patience)
        return [Ranks(store, n, count, key, given[n], wait) for n in range(count)]

    return make


def at_once(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def test_the_same_plans_are_agreed_on_for_each_model(ranks):
    for key, rows in (("fuseplug/0", ROWS), ("fuseplug/1", [])):
        assert at_once(*(lambda r=r, rows=rows: r.difference(rows) for r in ranks(key=key))) == ["", "", ""]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (ROWS[:1], "would fuse model.mlp forward: g, silu, and rank "),
        ([*ROWS, "a.b c: d, e", "z.b c: d, e"], "would fuse a.b c: d, e and 1 more, and rank "),
        (ROWS[::-1], "name the targets in another order"),
    ],
)
def test_a_difference_is_told_to_all_in_the_same_words(ranks, other, expected):
    first, second, third = ranks()
    told = at_once(lambda: first.difference(ROWS), lambda: second.difference(other), lambda: third.difference(ROWS))
    assert len(set(told)) == 1
    assert expected in told[0]
    assert "rank 1" in told[0]


def test_a_rank_that_does_not_come_keeps_nobody_and_finds_out_later(ranks):
    first, second, late = ranks(patience=0.2)
    told = at_once(lambda: first.difference(ROWS), lambda: second.difference(ROWS))
    assert "not all of 3 ranks had a plan" in told[0]
    assert {late.difference(ROWS), *told} == {told[0]}


def test_a_rank_without_a_plan_says_why(ranks):
    first, second = ranks(2)
    second.refuse("rank 1 has no plan: it broke")
    assert first.difference(ROWS) == "rank 1 has no plan: it broke"


def test_a_process_that_is_alone_asks_nobody():
    alone = Ranks.now(0)
    with alone.compiling_first():
        alone.refuse("no matter")
    assert (alone.store, alone.difference(ROWS)) == (None, "")


@pytest.mark.parametrize("fails", [False, True])
def test_local_rank_0_is_first_on_each_machine(ranks, fails):
    places = [(node, local) for node in ("a", "b") for local in ("0", "1")]
    environs = [{"GROUP_RANK": node, "LOCAL_RANK": local} for node, local in places]
    done, guard = [], threading.Lock()

    def compile_on(rank, node, local):
        with contextlib.suppress(ValueError), rank.compiling_first():
            if local == "0":
                time.sleep(0.1)
            with guard:
                done.append((node, local))
            if fails:
                raise ValueError("planted")

    four = ranks(4, environs=environs, store=Impatient(distributed.HashStore()))
    at_once(*(lambda r=r, p=p: compile_on(r, *p) for r, p in zip(four, places, strict=True)))
    for node in ("a", "b"):
        assert [local for where, local in done if where == node] == ["0", "1"]


def test_ranks_without_a_local_one_compile_at_once(ranks):
    (rank, *_) = ranks(2, environs=[{"LOCAL_RANK": "1"}, {"LOCAL_RANK": "0"}], patience=0.1)
    with rank.compiling_first():  # the other rank does not come
        pass
    (rank, *_) = ranks(2, key="fuseplug/1")
    with rank.compiling_first():
        pass
