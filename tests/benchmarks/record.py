"""Shared by all benchmarks here: tables, and a record that names the machine, the versions and the date."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table as RichTable

from fuseplug_tools.bench import emulates_bfloat16, machine

RESULTS = Path(__file__).parents[2] / "docs" / "results"
WIDTH = 150
BOTH = ("bfloat16", "float32")


def must_have_kept(folder: Path | str) -> None:
    """Exit if *folder* has no kept checks, so that no time is published as measured with kept checks by mistake."""
    if not any(Path(folder).rglob("*.json")):
        raise SystemExit(
            f"no check was kept in {folder}, as for editable installations; install the distributions (pip "
            "install ./core/verify ./core ./core/tools ./kernel-packages/*) and measure again"
        )


@dataclass
class Table:
    """The rows of one measurement. A cell may be a dictionary that `spread` returned."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, *cells: Any) -> None:
        self.rows.append(cells)

    def show(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column)
        for row in self.rows:
            table.add_row(*(_show(cell) for cell in row))
        return table


def dtypes() -> Sequence[str]:
    """The default dtypes of measurements. A CPU that emulates bfloat16 would take hours for it, so it is left out."""
    return ("float32",) if emulates_bfloat16() else BOTH


def gpu(index: int = 0) -> dict[str, Any]:
    """The GPU, its driver and its limits."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    said = _nvidia_smi(index, ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.memory"))
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": properties.L2_cache_size / 2**20,
        "cuda": torch.version.cuda,
        **said,
    }


def write(name: str, tables: Sequence[Table], about: Mapping[str, Any] | None = None) -> None:
    """Print *tables*, and `save` them."""
    show(tables)
    facts = save(name, tables, about)
    print(f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}, torch {facts['versions']['torch']}")


def show(tables: Sequence[Table], file: TextIO | None = None) -> None:
    """Print *tables* to *file*, or to the standard output."""
    console = Console(width=WIDTH, file=file)
    for table in tables:
        console.print(table.show())


def save(
    name: str, tables: Sequence[Table], about: Mapping[str, Any] | None = None, folder: Path = RESULTS
) -> dict[str, Any]:
    """Write *tables* as ``<folder>/<name>.json``, with the facts from `machine` and *about*; return these facts."""
    facts = machine() | dict(about or {})
    folder.mkdir(parents=True, exist_ok=True)
    content = [{"title": t.title, "rows": [dict(zip(t.columns, row, strict=True)) for row in t.rows]} for t in tables]
    (folder / f"{name}.json").write_text(json.dumps({"machine": facts, "tables": content}, indent=1) + "\n")
    return facts


def _nvidia_smi(index: int, fields: Sequence[str]) -> dict[str, str]:
    """The answers of nvidia-smi to *fields*, or "unknown": a container may lack nvidia-smi."""
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return dict.fromkeys(fields, "unknown")
    return dict(zip(fields, map(str.strip, said.split(",")), strict=True))


def _show(cell: Any) -> str:
    if isinstance(cell, dict):
        return f"{cell['median']:.4g} ({cell['quartile_1']:.4g} – {cell['quartile_3']:.4g}, n={cell['n']})"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
