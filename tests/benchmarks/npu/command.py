"""The command of ``run.py``: the conformance kit checks every kernel, then the right ones race."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.contest.problems import BOTH, FORWARD, OURS, WORKS, Kind
from benchmarks.contest.race import Out, Result, race
from benchmarks.contest.timing import DeviceClock, host_clock
from benchmarks.gpu.verdict import every_time, left_out, verdicts
from benchmarks.record import Table, save, show

from fuseplug import BaseKernel, manager
from fuseplug_testing import ConformanceError, check_kernel
from fuseplug_tools.bench import machine
from fuseplug_tools.bench.this_machine import VERSIONS
from fuseplug_tools.doctor import examine, look

from .ops import OPS, TRITON

NO_NPU = "There is no NPU here, so nothing was measured; `fuseplug doctor` says what is missing."
PACKAGES = (*VERSIONS, "torch_npu", TRITON)
EVERY_SHAPE = "every shape"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. The result is 0 unless there is no NPU, or a kernel of ours is wrong or fails."""
    options = parse(arguments)
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        print(NO_NPU)
        return 2
    dry, dtype = options.dry_run, torch.float32 if options.dry_run else torch.bfloat16
    kind = Kind(torch.device("npu", npu.current_device()), dtype)
    checks, wrong = check(options.only, quick=options.quick or dry, numbers_only=dry)
    timed, out = [], [Out(op, EVERY_SHAPE, OURS, "wrong: see the table above", fault=True) for op in wrong]
    for results, others in races([op for op in options.only if op not in wrong], kind, options):
        timed += results
        out += others
    times = [took_part(timed)] if dry else [verdicts(timed, None), every_time(timed, None)]
    write([checks, left_out(out), *times], options.folder)
    return int(any(one.fault and one.contender == OURS for one in out))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and time the kernels on this NPU.")
    parser.add_argument("--only", nargs="+", choices=OPS, default=list(OPS), help="the kernels of these ops alone")
    parser.add_argument("--quick", action="store_true", help="fewer checks, two shapes of each op, no backward alone")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, and no times: checks the benchmark itself")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where npu.json and npu.txt are written")
    return parser.parse_args(arguments)


def check(ops: Sequence[str], *, quick: bool, numbers_only: bool) -> tuple[Table, list[str]]:
    """The conformance kit's verdicts on the kernels for NPUs, and the ops of the wrong kernels."""
    table, wrong = Table("right on this NPU?", ("kernel", "op", "verdict", "checks passed", "why not")), []
    for kernel in kernels(ops):
        try:
            result, why = (
                check_kernel(kernel, device="npu", quick=quick, checks=["numbers"] if numbers_only else None),
                "",
            )
        except ConformanceError as error:
            result, why = error.result, str(error)
            wrong.append(kernel.op)
        table.add(kernel.kernel_id, kernel.op, "wrong" if why else "right", ", ".join(result.passed), why)
        print(f"{kernel.kernel_id}: {'wrong' if why else 'right'}", flush=True)
    return table, wrong


def kernels(ops: Sequence[str]) -> list[BaseKernel]:
    """The installed kernels for NPUs that compute *ops*; if these are all, also the kernels without a benchmark."""
    ready = [record.kernel for record in manager.kernels() if record.kernel]
    every = [kernel for kernel in ready if "npu" in kernel.device_types]
    return [kernel for kernel in every if kernel.op in ops or len(ops) == len(OPS)]


def races(names: Sequence[str], kind: Kind, options: argparse.Namespace) -> Iterator[tuple[list[Result], list[Out]]]:
    """Yield the results of each op at each shape. If a shape fails, it is left out, and the others go on."""
    clock: Any = host_clock if options.dry_run else DeviceClock(kind.device, ahead=True)
    for op in map(OPS.__getitem__, names):
        for shape in op.tiny if options.dry_run else op.shapes[:2] if options.quick else op.shapes:
            try:
                yield race(op, shape, kind, clock, (FORWARD, BOTH) if options.quick else WORKS)
            except Exception as error:  # a machine that nobody has seen may fail in any way
                traceback.print_exc()
                yield [], [Out(op.name, str((*shape,)), OURS, f"{type(error).__name__}: {error}"[:200], fault=True)]


def took_part(timed: Sequence[Result]) -> Table:
    """A table of the contenders that were right at each shape, without times."""
    table = Table("right, and called", ("op", "shape", "contender", "works"))
    works: dict[tuple[str, str, str], list[str]] = {}
    for result in timed:
        works.setdefault((result.op, result.shape, result.contender), []).append(result.work)
    for key, names in works.items():
        table.add(*key, ", ".join(names))
    return table


def write(tables: Sequence[Table], folder: Path) -> None:
    """Print *tables*, and write them to ``npu.json`` and, for people, to ``npu.txt``."""
    chip = {"chip": torch.npu.get_device_name(0), "cann": getattr(torch.version, "cann", None)}
    doctor = [row._asdict() for row in examine(look(), manager.kernels())]
    about = {**chip, "versions": machine(PACKAGES)["versions"], "doctor": doctor}
    shown = [table for table in tables if table.rows]
    save("npu", tables, about, folder)
    with (folder / "npu.txt").open("w", encoding="utf-8") as file:
        show(shown, file)
    show(shown)
    print(f"Please send {folder / 'npu.json'} and {folder / 'npu.txt'} to the project, whatever they say.")
