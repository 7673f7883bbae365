"""Times what a call of each Triton kernel costs the host, at one token, where only this counts. Needs no GPU.

Triton compiles for a GPU that is absent, and a launch does everything but call the driver. torch's own operations run
on the CPU, and the backward runs on the calling thread. Contenders take turns.

    python tests/benchmarks/host.py [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.contest.problems import BOTH, FORWARD, LIGER, OURS, Kind, Op
from benchmarks.contest.turns import Entry
from benchmarks.ops import moe, rmsnorm, rope, swiglu
from benchmarks.record import Table, write

from fuseplug_testing.triton import compile_only
from fuseplug_tools.bench import by_turns, machine, spread
from fuseplug_tools.bench.this_machine import VERSIONS

CAPABILITY = 90
WAITS = {moe.OP.name: "not timed: in each call it waits for a number that the GPU computes"}
"""Ops for which Liger-Kernel cannot be timed without a GPU."""
PACKAGES = (*VERSIONS, "triton", "liger-kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with compile_only(CAPABILITY):
        tables = [measure(op, options.repeats) for op in (rmsnorm.OP, swiglu.OP, rope.OP, moe.OP)]
    about = {
        "gpu": f"none: compiled for compute capability {CAPABILITY / 10}, nothing was launched",
        "versions": machine(PACKAGES)["versions"],
    }
    write("host-overhead", tables, about)


def measure(op: Op, repeats: int) -> Table:
    """The host's microseconds for a call of each contender that Triton compiles."""
    torch.manual_seed(0)
    problem = op.problem(op.single, Kind(torch.device("cpu"), torch.bfloat16))
    title = f"{op.name}, {problem.shape}, bfloat16: the host's µs for a call, without the driver's"
    table = Table(title, ("work", "contender", "µs", f"× {LIGER}, turn by turn"))
    names = (OURS,) if op.name in WAITS else (OURS, LIGER)
    entries = [Entry(contender, problem) for contender in op.contenders if contender.name in names]
    for work in (FORWARD, BOTH):
        turns = {entry.name: entry.turn(work) for entry in entries}
        samples = by_turns({name: lambda turn=turn: turn.run(None) for name, turn in turns.items()}, repeats)
        for name, microseconds in samples.items():
            ratios = [peer / own for peer, own in zip(samples.get(LIGER, ()), microseconds, strict=False)]
            table.add(work, name, spread(microseconds), statistics.median(ratios) if ratios else WAITS[op.name])
    return table


if __name__ == "__main__":
    main()
