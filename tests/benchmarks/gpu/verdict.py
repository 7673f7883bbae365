"""Tables of the times: ours against the best peer, against Liger-Kernel, and against the device's ceilings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from benchmarks.record import Table

from ..contest.aims import BEST, Aim
from ..contest.problems import EAGER, LIGER, OURS
from ..contest.race import Out, Result
from .ceilings import Ceilings

TITLE = f"{OURS} against its peers; × is a peer's time over ours, share the part of the ceiling that ours reaches"


def verdicts(timed: Sequence[Result], ceilings: Ceilings | None, title: str = TITLE) -> Table:
    """A row for each work at each shape: the time of ours, and how many times longer the others take."""
    columns = ("op", "shape", "work", "ours, µs", "best peer", "its µs", "× best", "× Liger", "× eager", "share", "aim")
    table = Table(title, columns)
    for (op, shape, work), group in groupby(timed, lambda r: (r.op, r.shape, r.work)):
        results = {result.contender: result for result in group}
        ours = results.get(OURS)
        peers = [result for name, result in results.items() if not name.startswith(OURS)]
        if ours is None or not peers:
            table.add(op, shape, work, "not timed", *[""] * 7)
            continue
        best = min(peers, key=lambda result: result.median)
        share = share_of_ceiling(ours, ceilings)
        times = (_times(results.get(name), ours) for name in (LIGER, EAGER))
        verdict = "" if ours.aim is None else _verdict(ours.aim, ours, {**results, BEST: best}, share)
        cells = (ours.median, best.contender, best.median, _times(best, ours), *times)
        table.add(op, shape, work, *cells, "" if share is None else f"{share:.0%}", verdict)
    return table


def share_of_ceiling(result: Result, ceilings: Ceilings | None) -> float | None:
    """The shortest time that the device needs for the work, divided by the measured time."""
    if ceilings is None or result.least is None:
        return None
    return 1e6 * ceilings.least_seconds(result.least) / result.median


def _times(peer: Result | None, ours: Result) -> str:
    return "" if peer is None else f"{peer.median / ours.median:.2f}"


def _verdict(aim: Aim, ours: Result, others: Mapping[str, Result], share: float | None) -> str:
    missed = [
        f"< {wanted:g} × {peer}"
        for peer, wanted in aim.speed.items()
        if peer in others and others[peer].median < wanted * ours.median
    ]
    if share is not None and share < aim.share:
        missed.append(f"< {aim.share:.0%}")
    return "missed: " + ", ".join(missed) if missed else "met"


def every_time(timed: Sequence[Result], ceilings: Ceilings | None) -> Table:
    """The times of all contenders."""
    table = Table("every contender, in µs", ("op", "shape", "work", "contender", "µs", "share"))
    for result in timed:
        share = share_of_ceiling(result, ceilings)
        table.add(result.op, result.shape, result.work, result.contender, dict(result.microseconds), share)
    return table


def left_out(out: Iterable[Out]) -> Table:
    """The contenders that were not timed, and why. Shapes with the same reason share a row."""
    table = Table("not timed", ("op", "contender", "why", "shapes"))
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for one in out:
        shapes.setdefault((one.op, one.contender, one.why), []).append(one.shape)
    for key, found in shapes.items():
        table.add(*key, found[0] if len(found) == 1 else f"{len(found)} shapes")
    return table
