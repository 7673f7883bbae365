"""Whole models, small, fused by every kernel: what was fused, and how far logits and gradients are from the unfused.

In float32 the distance is that between fused and unfused; in bfloat16 it is that of each from the unfused model in
float32. The largest over all tensors is given, as a share of the tensor's size.

    python tests/benchmarks/parity.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
import transformers
from record import Table, write
from torch import Tensor

from fuseplug import Report, manager
from fuseplug.inductor import compiled

sys.path.append(str(Path(__file__).parents[1]))
from support.tiny import TINY, build, exists, step

COLUMNS = ("model", "fused", "left alone", "float32", "bfloat16 fused", "bfloat16 unfused", "undo exact")


def main() -> None:
    compiled.SMALL = 1  # these models are small: without it, plain PyTorch would be compared with itself
    table = Table(f"Parity, transformers {transformers.__version__}", COLUMNS)
    for name in filter(exists, TINY):
        table.add(name, *measure(name))
    write(f"parity-transformers-{transformers.__version__}", [table])


def measure(name: str) -> tuple[str, str, float, float, float, bool]:
    wide, narrow = build(name), build(name, torch.bfloat16)
    before, half_before = step(wide), step(narrow)
    with manager.apply_all(wide, every_size=True) as applied:
        gap = farthest(step(wide), before)
    with manager.apply_all(narrow, every_size=True):
        half_fused = step(narrow)
    exact = all(torch.equal(value, before[key]) for key, value in step(wide).items())
    truth = step(narrow.float())
    return (*account(applied.report), gap, farthest(half_fused, truth), farthest(half_before, truth), exact)


def account(report: Report) -> tuple[str, str]:
    fused = Counter(f"{entry.op} {entry.variant}" for entry in report.fused)
    alone = Counter(f"{entry.class_name}: {entry.why_not[:60]}" for entry in report.left_alone if not entry.covered_by)
    return tuple("; ".join(f"{count} {what}" for what, count in each.items()) for each in (fused, alone))


def farthest(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    return max(((found[key].double() - t.double()).norm() / t.double().norm()).item() for key, t in true.items())


if __name__ == "__main__":
    main()
