"""The command of ``run.py``: its options, the order of its parts, and an end on time."""

from __future__ import annotations

import argparse
import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from benchmarks.record import RESULTS, Table, gpu, save, show

from fuseplug_backends.triton.kernel import interpreted
from fuseplug_tools.bench import machine
from fuseplug_tools.bench.this_machine import VERSIONS

from ..contest.problems import BOTH, FORWARD, WORKS, Kind
from ..contest.race import Clock, Out, Result, race
from ..contest.timing import DeviceClock, asking_clock, host_clock
from ..ops import linear_cross_entropy, moe, rmsnorm, rope, swiglu
from . import models
from .budget import Budget
from .ceilings import Ceilings, measure
from .end_to_end import end_to_end
from .interpreting import let_peers_in
from .overhead import overhead
from .roofline import draw
from .verdict import every_time, left_out, verdicts

OPS = {op.name: op for op in (rmsnorm.OP, swiglu.OP, rope.OP, moe.OP, linear_cross_entropy.OP)}
OVERHEAD, END_TO_END = "overhead", "end-to-end"
CALLS = "the host's time for a call at one token, no CUDA graph"
PARTS = {
    "rmsnorm": 11.0,
    "swiglu": 6.0,
    "rope": 5.0,
    "moe": 14.0,
    "linear_cross_entropy": 10.0,
    OVERHEAD: 5.0,
    END_TO_END: 20.0,
}
"""Each part of a run, with its weight when time is divided: the number of shapes that would cost as much."""

PACKAGES = (*VERSIONS, "triton", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl")
NO_GPU = "There is no CUDA GPU here, so nothing was measured; tests/benchmarks/host.py measures what needs none."
CHECKED = "The benchmark checked itself: these times mean nothing and were not written."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. The result is 0 unless there is no GPU, or a contender is wrong or fails."""
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return 2
    if options.device == "cpu" and not interpreted():
        print("On the CPU the benchmark checks itself, in Triton's interpreter: set TRITON_INTERPRET=1.")
        return 2
    if options.device == "cpu":
        let_peers_in()
    run = Run(options)
    try:
        run.everything()
    finally:
        run.end()
    return int(run.faults > 0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the kernels on this GPU against their peers.")
    parser.add_argument("--minutes", type=float, default=8.0, help="when to start no new measurement (default: 8)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="measure only these parts")
    parser.add_argument("--quick", action="store_true", help="two shapes of each op, and no backward alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", choices=("full", "tiny"), default="full", help="tiny: for --device cpu")
    return parser.parse_args(arguments)


Step = Callable[[], tuple[list[Result], list[Out]]]


class Run:
    """One run of the benchmark, with its results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._measuring = options.device == "cuda"
        # The interpreter rounds bfloat16 differently than a GPU, and float32 hides fewer mistakes behind rounding.
        self._kind = Kind(torch.device(options.device), torch.bfloat16 if self._measuring else torch.float32)
        self._parts = {part: weight for part, weight in PARTS.items() if part in options.only}
        self._budget = Budget(options.minutes, self._parts)
        self._ceilings: Ceilings | None = None
        self._timed: list[Result] = []
        self._calls: list[Result] = []
        self._out: list[Out] = []
        self._not_measured = Table("not measured", ("what", "why"))
        self.faults = 0

    def everything(self) -> None:
        """Run all parts, each for as long as its time lasts."""
        clock = whole = host_clock
        if self._measuring:
            clock, whole = (DeviceClock(self._kind.device, ahead=ahead) for ahead in (True, False))
            self._ceilings = measure(self._kind, clock)
        for part in self._parts:
            self._budget.begin(part)
            for what, step in self._steps(part, clock, whole):
                if self._budget.over:
                    self._not_measured.add(what, "out of time")
                else:
                    self._take(part, what, step)
            self._save()  # so that the results so far survive if the run is killed

    def _steps(self, part: str, clock: Clock, whole: Clock) -> Iterator[tuple[str, Step]]:
        tiny, quick = self._options.shapes == "tiny", self._options.quick
        if part == OVERHEAD:
            asking = asking_clock if self._measuring else host_clock
            for op in OPS.values():
                shape = op.tiny[0] if tiny else op.single
                yield f"a call of {op.name}", partial(overhead, op, shape, self._kind, asking)
        elif part == END_TO_END:
            for blocks in models.TINY if tiny else models.FULL:
                yield blocks.name, partial(end_to_end, blocks, self._kind, whole, self._budget)
        else:
            op = OPS[part]
            for shape in op.tiny if tiny else op.shapes[:2] if quick else op.shapes:
                works = (FORWARD, BOTH) if quick else WORKS
                yield f"{op.name} {(*shape,)}", partial(race, op, shape, self._kind, clock, works)

    def _take(self, part: str, what: str, step: Step) -> None:
        try:
            timed, out = step()
        except torch.OutOfMemoryError:
            self._not_measured.add(what, "out of memory")
        except Exception as error:  # one shape fails, and the others are still measured
            traceback.print_exc()
            self._not_measured.add(what, f"{type(error).__name__}: {error}")
            self.faults += 1
        else:
            (self._calls if part == OVERHEAD else self._timed).extend(timed)
            self._out += out
            self.faults += sum(one.fault for one in out)
        gc.collect()
        torch.cuda.empty_cache()

    def end(self) -> None:
        """Print the results."""
        show([table for table in self._tables() if table.rows])
        if not self._measuring:
            print(CHECKED)
        elif self._ceilings is not None:
            bandwidth, rate = self._ceilings
            print(
                f"{gpu()['gpu']}: copies {bandwidth / 1e12:.2f} TB/s, multiplies {rate / 1e12:.0f} TFLOP/s in bfloat16"
            )

    def _tables(self) -> list[Table]:
        return [
            verdicts(self._timed, self._ceilings),
            verdicts(self._calls, None, CALLS),
            left_out(self._out),
            self._not_measured,
        ]

    def _save(self) -> None:
        if not self._measuring:
            return
        about = gpu() | {"versions": machine(PACKAGES)["versions"], "measured ceilings": self._ceilings._asdict()}
        times = every_time((*self._timed, *self._calls), self._ceilings)
        save("gpu", [*self._tables(), times], about)
        draw(self._timed, self._ceilings, about, RESULTS / "gpu.png")
