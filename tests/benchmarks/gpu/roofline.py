"""Draws how near each op comes to the rates that this device reached in copying and multiplying."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ..contest.problems import BOTH, EAGER, FORWARD, LIGER, OURS
from ..contest.race import Result
from .ceilings import Ceilings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, FAINT = "#22262b", "#7b818a"
TITLES = {FORWARD: "Forward", BOTH: "Forward and backward"}
MARKS = {
    EAGER: ("#7b818a", "s", 26),
    "torch.compile": ("#1971c2", "D", 26),
    LIGER: ("#2f9e44", "^", 34),
    OURS: ("#d9480f", "o", 46),
}
"""Colour, marker and size, by contender. The last one is drawn on top."""
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.edgecolor": INK,
    "text.color": INK,
    "figure.facecolor": "white",  # not transparent, because dark pages show it, too
}


def draw(timed: Sequence[Result], ceilings: Ceilings, about: Mapping[str, Any], path: Path) -> None:
    """Write the picture of *timed* to *path*, unless no result of *timed* has a ceiling."""
    shown = [result for result in timed if result.contender in MARKS and result.work in TITLES]
    bounded = [result for result in shown if result.least is not None]
    copying = [result for result in bounded if not _multiplies(result, ceilings)]
    multiplying = [result for result in bounded if _multiplies(result, ceilings)]
    kinds = [
        (copying, 1e-12, ceilings.bandwidth, "TB/s read and written", "copy", "bytes"),
        (multiplying, 1e-12, ceilings.rate, "TFLOP/s, bfloat16", "matmul", "flops"),
    ]
    kinds = [kind for kind in kinds if kind[0]]
    if not kinds:
        return
    rows = [len(_labels(results)) for results, *_ in kinds]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 1.8 + 0.24 * sum(rows) + 0.7 * len(kinds)), layout="constrained")
        grid = figure.subplots(len(kinds), 2, squeeze=False, height_ratios=[count + 1 for count in rows])
        for axes, (results, scale, ceiling, unit, name, amount) in zip(grid, kinds, strict=True):
            labels = _labels(results)
            for panel, work in zip(axes, (FORWARD, BOTH), strict=True):
                _draw(panel, [r for r in results if r.work == work], labels, scale, amount)
                panel.axvline(scale * ceiling, color=INK, linewidth=1.2, linestyle="--")
                panel.text(scale * ceiling, -0.8, f"{name} ", ha="right", va="center", fontsize=8.5)
                panel.set_xlim(0, 1.04 * max(panel.get_xlim()[1], scale * ceiling))
                panel.set_xlabel(unit)
                panel.set_title(TITLES[work])
            axes[1].set_yticklabels([])
        handles = {h.get_label(): h for panel in grid.flat for h in panel.collections}
        figure.legend(handles=list(handles.values())[::-1], loc="outside upper right", ncols=len(MARKS), frameon=False)
        figure.suptitle(
            f"{about['gpu']}: how near each op comes to the device's limits", x=0.01, ha="left", fontweight="bold"
        )
        versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "triton", "liger-kernel"))
        figure.supxlabel(f"{versions}; medians, cold L2 cache", fontsize=8.5, color=FAINT)
        figure.savefig(path, dpi=150)


def _multiplies(result: Result, ceilings: Ceilings) -> bool:
    """Whether the device needs longer for the multiplications than for the bytes."""
    return result.least.flops / ceilings.rate > result.least.bytes / ceilings.bandwidth


def _labels(results: Sequence[Result]) -> list[str]:
    """The names of the rows: ops in the order of *results*, and the shapes of each op by size."""
    rows = list(dict.fromkeys((result.op, result.shape) for result in results))
    ops = [op for op, _ in rows]
    by_size = sorted(rows, key=lambda row: (ops.index(row[0]), [int(size) for size in re.findall(r"\d+", row[1])]))
    return [f"{op}  {shape}" for op, shape in by_size]


def _draw(panel: Axes, results: Sequence[Result], labels: Sequence[str], scale: float, amount: str) -> None:
    for name, (color, marker, size) in MARKS.items():
        mine = [result for result in results if result.contender == name]
        reached = [scale * getattr(result.least, amount) / result.median * 1e6 for result in mine]
        heights = [labels.index(f"{result.op}  {result.shape}") for result in mine]
        panel.scatter(reached, heights, s=size, color=color, marker=marker, label=name, linewidths=0, zorder=3)
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(len(labels) - 0.4, -1.2)
    panel.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    panel.tick_params(axis="y", length=0)
