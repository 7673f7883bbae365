"""A benchmark as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    torch, transformers = about["versions"]["torch"], about["versions"]["transformers"]
    console.print(one_line(benchmark.model))
    where = about.get("gpu") or about["cpu"]
    console.print(f"{where}, {about['cores']} cores, torch {torch}, transformers {transformers}")
    console.print(one_line(benchmark.report.summary()))
    for distance in benchmark.checked:
        verdict = "right" if distance.right else f"WRONG: at most {distance.allowed:.2g} is allowed"
        console.print(f"{distance.what}: {distance.fused:.2g} from the truth, eager {distance.unfused:.2g}: {verdict}")
    for name, seconds in benchmark.once.items():
        console.print(f"paid once by {name}: {seconds:.1f} s")
    console.print(with_whole_words(_times(benchmark), console.width))
    if benchmark.unused:
        console.print(f"{benchmark.unused} fused targets had no call that a kernel computed: --ops says why")
    for (mode, tokens), shares in benchmark.shares.items():
        table = _table("operation", f"{EAGER}, %", f"{FUSED}, % of eager")
        for share in shares:
            table.add_row(one_line(share.operation)[:60], f"{share.before:.1%}"[:-1], f"{share.after:.1%}"[:-1])
        console.print(f"where the time goes, {mode}, {tokens} tokens, by torch's profiler")
        console.print(with_whole_words(table, console.width))
    for (mode, tokens), ops in benchmark.ops.items():
        console.print(f"each kernel by itself, {mode}, {tokens} tokens")
        console.print(with_whole_words(_ops(ops), console.width, ("where",)))


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
