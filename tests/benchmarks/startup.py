"""Times what a user waits for: importing fuseplug, finding kernels, ``fuseplug list``, ``apply_all`` on a whole model.

Every run is a fresh process. The processes that are compared take turns. Their files are in the page cache.

    python tests/benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from record import Table, must_have_kept, write

from fuseplug_tools.bench import spread

INSTALLED = 300
WITH_KERNELS = 12

KERNEL = """
from fuseplug import BaseKernel

class Kernel(BaseKernel):
    kernel_id = "kernel_{}"
    op = function = reference = "a:b"

    def match(self, site):
        return None
"""

APPLIED = 3
"""How often ``apply_all`` is timed with empty directories. Each time takes a minute."""

FUSED = {"training": 170, "inference": 169}
"""The number of fused targets, by mode: the loss is fused for training only."""

APPLY = """
import sys, time
from fuseplug import manager
from fuseplug_tools.bench.models import build_random
import torch
from transformers.initialization import no_init_weights
with no_init_weights():
    model = build_random("qwen3-0.6b", layers=None, dtype=torch.bfloat16, device="cpu")
noise = torch.randn(1 << 20).mul(0.02).bfloat16()
for weight in model.parameters():
    if weight.dim() == 2:  # copies of numbers: to draw all of them takes seven seconds more
        weight.data = noise.repeat(-(-weight.numel() // len(noise)))[: weight.numel()].view_as(weight)
start = time.perf_counter()
report = manager.apply_all(model, allow=["lazy_logits"], mode=sys.argv[1]).report
took = time.perf_counter() - start
assert (len(report.fused), len(report.entries)) == (int(sys.argv[2]), 170), report
print(took)
"""

# The process times itself, so that its start does not count.
TIMED = "import time; start = time.perf_counter(); {}; print(1000 * (time.perf_counter() - start))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as directory:
        few, all_of_them = Path(directory, "few"), Path(directory, "all")
        install(few, WITH_KERNELS)
        install(all_of_them, INSTALLED)
        tables = [processes(runs), discovery(runs, {WITH_KERNELS: few, INSTALLED: all_of_them}), applying(APPLIED)]
    write("startup", tables)


def install(site: Path, with_kernels: int) -> None:
    """Write `INSTALLED` distributions; the first *with_kernels* of them have a kernel, the others a console script."""
    for number in range(INSTALLED):
        info = site / f"fake_{number}-1.0.dist-info"
        info.mkdir(parents=True)
        head = f"Metadata-Version: 2.1\nName: fake-{number}\nVersion: 1.0\nRequires-Dist: pluggy>=1.5\n\n"
        (info / "METADATA").write_text(head + "A description as long as most are.\n" * 100)
        has_kernel = number < with_kernels
        entry = f"[fuseplug.kernels]\nkernel_{number} = fake_{number}:Kernel\n"
        (info / "entry_points.txt").write_text(entry if has_kernel else "[console_scripts]\na = b:c\n")
        if has_kernel:
            (site / f"fake_{number}.py").write_text(KERNEL.format(number))


def processes(runs: int) -> Table:
    """Time whole processes, by turns with a bare interpreter, and subtract the time of the bare interpreter."""
    commands = {
        "bare interpreter": ("-c", "pass"),
        "import fuseplug": ("-c", "import fuseplug"),
        "manager.kernels()": ("-c", "from fuseplug import manager; manager.kernels()"),
        "fuseplug list": ("-m", "fuseplug", "list"),
    }
    took: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            python(*command)
            took[name].append(1000 * (time.perf_counter() - start))
    table = Table("whole processes, in ms", ("what", "process", "beyond the bare interpreter"))
    bare = took["bare interpreter"][1:]
    for name, times in took.items():
        table.add(name, spread(times[1:]), spread([a - b for a, b in zip(times[1:], bare, strict=True)]))
    return table


def discovery(runs: int, sites: Mapping[int, Path]) -> Table:
    """Time the first `manager.kernels()` of a process after ``import fuseplug``, including the imports of this call."""
    table = Table(
        f"manager.kernels() with {INSTALLED} distributions on a path of their own, in ms",
        ("with kernels", "cold", "of it imports"),
    )
    for number, site in sites.items():
        cold, imports = [], []
        for _ in range(runs + 1):
            environ = {"PYTHONPATH": str(site)}
            call = TIMED.format("kernels = fuseplug.manager.kernels()")
            ready = f"assert sum(r.kernel_id.startswith('kernel_') and r.state == 'ready' for r in kernels) == {number}"
            cold.append(float(python("-c", f"import fuseplug; {call}; {ready}", **environ)))
            imports.append(float(python("-c", f"import fuseplug; {TIMED.format('fuseplug.KernelManager')}", **environ)))
        table.add(number, spread(cold[1:]), spread(imports[1:]))
    return table


def applying(runs: int) -> Table:
    """Time the first ``apply_all`` of a process, on all layers of Qwen3-0.6B with its vocabulary."""
    kinds = ("with nothing kept and nothing compiled", "with what was compiled before", "with what was checked before")
    seconds: dict[tuple[str, str], list[float]] = {(kind, mode): [] for kind in kinds for mode in FUSED}
    for _ in range(runs):
        for mode, fused in FUSED.items():
            with tempfile.TemporaryDirectory() as compiled, tempfile.TemporaryDirectory() as kept:
                for kind, cache in zip(kinds, ("off", kept, kept), strict=True):
                    if kind == kinds[-1]:
                        must_have_kept(kept)
                    # Inductor keeps a compiled header among the machine's temporary files, wherever its cache is.
                    environ = {"TORCHINDUCTOR_CACHE_DIR": compiled, "TMPDIR": compiled, "FUSEPLUG_CACHE": cache}
                    seconds[kind, mode].append(float(python("-c", APPLY, mode, str(fused), **environ)))
    title = "apply_all on Qwen3-0.6B, 28 layers, bfloat16, all ops, in a new process, in s"
    table = Table(title, ("what", *(f'mode="{mode}"' for mode in FUSED)))
    for kind in kinds:
        table.add(kind, *(spread(seconds[kind, mode]) for mode in FUSED))
    return table


def python(*args: str, **environ: str) -> str:
    """Run a fresh Python, and return its output."""
    done = subprocess.run(
        [sys.executable, *args], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
