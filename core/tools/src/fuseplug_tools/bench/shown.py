"""A benchmark as tables for a terminal, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseplug.errors import PlanError
from fuseplug.report.plain_text import one_line
from fuseplug.report.tables import with_whole_words

from .contenders import EAGER, FUSED

if TYPE_CHECKING:
    from rich.console import Console

    from .comparing import Benchmark
    from .ops import OpRow


def show(benchmark: Benchmark, console: Console) -> None:
    """Print *benchmark* on *console*."""
    about = benchmark.machine
    versions = about["versions"]
    console.print(one_line(benchmark.model))
    where = about.get("gpu") or about["cpu"]
    console.print(
        f"{where}, {about['cores']} cores, torch {versions['torch']}, transformers {versions['transformers']}"
    )
    console.print(one_line(benchmark.report.summary()))
    for distance in benchmark.checked:
        verdict = "right" if distance.right else f"WRONG: at most {distance.allowed:.2g} is allowed"
        console.print(f"{distance.what}: {distance.fused:.2g} from the truth, eager {distance.unfused:.2g}: {verdict}")
    for name, seconds in benchmark.once.items():
        console.print(f"paid once by {name}: {seconds:.1f} s")
    console.print(with_whole_words(_times(benchmark), console.width))
    for (mode, tokens), shares in benchmark.shares.items():
        table = _table("operation", f"{EAGER}, %", f"{FUSED}, % of eager")
        for share in shares:
            table.add_row(one_line(share.operation)[:60], f"{share.before:.1%}"[:-1], f"{share.after:.1%}"[:-1])
        console.print(f"where the time goes, {mode}, {tokens} tokens, by torch's profiler")
        console.print(with_whole_words(table, console.width))
    for (mode, tokens), ops in benchmark.ops.items():
        console.print(f"each kernel by itself, {mode}, {tokens} tokens")
        console.print(with_whole_words(_ops(ops), console.width, ("where",)))


def draw(benchmark: Benchmark, path: Path) -> None:
    """Draw the times of *benchmark* into the file *path*: bars with quartiles, a panel for each mode.

    Raises:
        PlanError: If matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("--plot needs matplotlib: pip install matplotlib") from error
    modes = list(dict.fromkeys(row.mode for row in benchmark.rows))
    names = list(dict.fromkeys(row.contender for row in benchmark.rows))
    figure = Figure(figsize=(2.5 + 3.8 * len(modes), 3.6), layout="constrained")
    panels = figure.subplots(1, len(modes), squeeze=False)[0]
    for panel, mode in zip(panels, modes, strict=True):
        rows = [row for row in benchmark.rows if row.mode == mode]
        counts = list(dict.fromkeys(row.tokens for row in rows))
        for number, name in enumerate(names):
            bars = [row for row in rows if row.contender == name]
            at = [counts.index(row.tokens) + (number - (len(names) - 1) / 2) * 0.8 / len(names) for row in bars]
            middle = [row.ms["median"] for row in bars]
            away = [[max(0.0, m - row.ms["quartile_1"]) for m, row in zip(middle, bars, strict=True)]]
            away += [[max(0.0, row.ms["quartile_3"] - m) for m, row in zip(middle, bars, strict=True)]]
            panel.bar(at, middle, 0.8 / len(names), yerr=away, capsize=2, label=name)
        panel.set_xticks(range(len(counts)), [str(count) for count in counts])
        panel.set_xlabel("tokens")
        panel.set_ylabel("ms")
        panel.set_title(mode)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize="small")
    figure.suptitle(one_line(benchmark.model), fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot {path}: {one_line(error)}") from error


def _times(benchmark: Benchmark) -> Any:
    table = _table("work", "tokens", "contender", "ms (quartiles)", "× eager", "peak, MB")
    before = None
    for row in benchmark.rows:
        work = (row.mode, str(row.tokens)) if (row.mode, row.tokens) != before else ("", "")
        before = (row.mode, row.tokens)
        ms = f"{row.ms['median']:.4g} ({row.ms['quartile_1']:.4g} – {row.ms['quartile_3']:.4g})"
        peak = "unknown" if row.peak is None else f"{row.peak / 1e6:,.0f}"
        table.add_row(*work, row.contender, ms, f"{row.gain:.2f}", peak)
    return table


def _ops(rows: Sequence[OpRow]) -> Any:
    table = _table("kernel", "where", "original, ms", "kernel, ms", "×")
    for row in rows:
        ms = ["–" if times is None else f"{times['median']:.3g}" for times in (row.original, row.kernel)]
        where = f"{row.where}, {row.variant}, {row.work}"
        where += f"; left to the original in the model: {row.declined}" if row.declined else ""
        table.add_row(one_line(row.kernel_id), one_line(where), *ms, "–" if row.gain is None else f"{row.gain:.2f}")
    return table


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        words = column in ("contender", "where", "operation")
        justify: Any = "left" if words or number == 0 else "right"
        table.add_column(column, justify=justify, no_wrap=number == 0 and not words, overflow="fold")
    return table
