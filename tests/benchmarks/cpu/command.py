"""The command of ``run.py``: it measures every contest, and writes a file for each op."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.record import BOTH as BOTH_DTYPES
from benchmarks.record import Table, dtypes, show, write

from fuseplug_tools.bench import by_turns, peak_memory, spread

from ..contest import turns
from ..contest.problems import BOTH, FORWARD, Contender, Kind, leaves
from ..contest.race import Out, admitted
from .contests import CONTESTS, ON_REQUEST, Contest

WORKS = {FORWARD: "forward", BOTH: "forward and backward"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: If a contender is wrong or fails.
    """
    options = parse(arguments)
    for file in options.only:
        tables = [
            table
            for contest in CONTESTS[file]
            for dtype in options.dtype or (dtypes() if contest.matmuls else BOTH_DTYPES)
            for table in measure(contest, dtype, options)
        ]
        if options.dry_run:
            show(tables)
        else:
            write(file, tables)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the kernels on this CPU against their peers.")
    usual = [file for file in CONTESTS if file not in ON_REQUEST]
    parser.add_argument("--only", nargs="+", choices=CONTESTS, default=usual, help="measure only these")
    parser.add_argument("--dtype", choices=BOTH_DTYPES, action="append", help="by default what the CPU computes in")
    parser.add_argument("--long", action="store_true", help="shapes that take minutes as well")
    parser.add_argument("--repeats", type=int, default=20, help="maximum number of turns")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of turns for each cell")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, and nothing written: checks the benchmark")
    return parser.parse_args(arguments)


def measure(contest: Contest, dtype: str, options: argparse.Namespace) -> list[Table]:
    """The times of all contenders at each shape: a table for each work."""
    unit = "ms" if contest.milliseconds else "µs"
    columns = (contest.shape, "contender", unit, f"× {contest.baseline}, turn by turn", *["peak, MB"] * contest.memory)
    tables = {work: Table(f"{contest.title}, {dtype}, {name}, in {unit}", columns) for work, name in WORKS.items()}
    kind = Kind(torch.device("cpu"), getattr(torch, dtype))
    for shape in contest.op.tiny if options.dry_run else (*contest.op.shapes, *(contest.long if options.long else ())):
        label, contestants = judged(contest, shape, kind)
        gradients = sum(leaf.nbytes for leaf in leaves(contestants[0].arguments))
        for work, table in tables.items() if gradients else [(FORWARD, tables[FORWARD])]:
            runs = {name: partial(turn.run, turn.prepare()) for name, turn in turns_of(contestants, work).items()}
            samples = by_turns(runs, options.repeats, warm_up=1, within=options.seconds)
            for name, times in samples.items():
                ratios = [base / own for base, own in zip(samples[contest.baseline], times, strict=True)]
                scale = 1e-3 if contest.milliseconds else 1.0
                memory = [_megabytes(runs[name], gradients if work is BOTH else 0) for _ in range(contest.memory)]
                table.add(label, name, spread([scale * time for time in times]), statistics.median(ratios), *memory)
    return [table for table in tables.values() if table.rows]


def judged(contest: Contest, shape: tuple[int, ...], kind: Kind) -> tuple[str, list[turns.Entry]]:
    """The name of *shape*, and the contenders that are right at the shape at which they are judged.

    Raises:
        SystemExit: If a contender is wrong or fails.
    """
    torch.manual_seed(0)
    torch.compiler.reset()
    problem = contest.op.problem(shape, kind)
    smaller = (at := contest.judged(shape)) != shape
    right, out = admitted(contest.op.name, contest.op.problem(at, kind) if smaller else problem, contest.op.contenders)
    if faults := [one for one in out if one.fault]:
        raise SystemExit("\n".join(map(_told, faults)))
    for one in out:
        print(_told(one))
    if smaller:
        contenders: Mapping[str, Contender] = {contender.name: contender for contender in contest.op.contenders}
        right = [turns.Entry(contenders[contestant.name], problem) for contestant in right]
    return problem.shape, right


def turns_of(contestants: Sequence[turns.Entry], work: str) -> dict[str, Any]:
    return {contestant.name: contestant.turn(work) for contestant in contestants}


def _megabytes(run: Callable[[], Any], gradients: int) -> float:
    """The peak of memory that *run* adds, less the bytes of the *gradients* that it returns."""
    peak = peak_memory(run)
    return math.nan if peak is None else (peak - gradients) / 1e6


def _told(out: Out) -> str:
    return f"{out.op} at {out.shape}: {out.contender} {out.why}"
