"""The pictures: two loss curves that should coincide, and step times that should not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import machine
import matplotlib as mpl
from matplotlib.figure import Figure, SubFigure
from timing import Race, Spread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from training import Run
    from vocabulary import Losses

UNFUSED = "#7b818a"
FUSED = "#d9480f"
INK = "#22262b"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.edgecolor": INK,
    "text.color": INK,
}


def draw(unfused: Run, fused: Run, races: Sequence[Race], path: Path) -> None:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 6), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=(1, 1.7), wspace=0.03)
        _draw_losses(left, unfused, fused)
        _draw_races(right, races)
        figure.suptitle("The same model, seed and batches, unfused and fused", fontsize=12, fontweight="bold")
        figure.supxlabel(machine.line(), fontsize=9, color=UNFUSED)
        figure.savefig(path, dpi=150)


def draw_loss(losses: Losses, path: Path) -> None:
    """Draw the time and the memory of a step with a real vocabulary."""
    kinds = {"seconds": "a training step", "gigabytes": "memory at its peak"}
    drawn = [kind for kind in kinds if getattr(losses.fused, kind)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.8 * len(drawn), 2.9), layout="constrained")
        for axes, kind in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            series = (getattr(losses.fused, kind), getattr(losses.unfused, kind))
            for height, values, color in zip((0, 1), series, (FUSED, UNFUSED), strict=True):
                middle = Spread.of(values).median
                axes.barh(height, middle, height=0.55, color=color)
                axes.plot(values, [height] * len(values), "|", color=INK, markersize=9)
                axes.text(0.02 * max(series[1]), height, f"{middle:.2f}", va="center", color="white", fontweight="bold")
            axes.set_yticks([0, 1], ["fused", "unfused"])
            axes.tick_params(axis="y", length=0)
            axes.set_xlim(0, 1.08 * max(map(max, series)))
            axes.set_xlabel(kind)
            axes.set_title(kinds[kind])
        figure.suptitle(
            f"The loss of 1024 tokens, a vocabulary of 151,936, {losses.dtype}", fontsize=12, fontweight="bold"
        )
        figure.supxlabel(f"bar: median; stroke: one step; {machine.line()}", fontsize=9, color=UNFUSED)
        figure.savefig(path, dpi=150)


def _draw_losses(figure: SubFigure, unfused: Run, fused: Run) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    top.plot(unfused.losses, color=UNFUSED, linewidth=5, alpha=0.55, label="unfused")
    top.plot(fused.losses, color=FUSED, linewidth=1.1, label="fused")
    top.set_title("Training loss, float32")
    top.set_ylabel("nats per byte")
    top.legend(frameon=False)

    differences = [abs(u - f) for u, f in zip(unfused.losses, fused.losses, strict=True)]
    unequal = [(i, d) for i, d in enumerate(differences) if d]
    if unequal:
        bottom.plot(*zip(*unequal, strict=True), ".", color=INK, markersize=3.5)
        bottom.set_yscale("log")
        low, high = min(d for _, d in unequal), max(differences)
        bottom.set_ylim(10 ** (_exponent(low) - 0.3), 10 ** (_exponent(high) + 1.3))
    equal = len(differences) - len(unequal)
    most = f"at most {max(differences):.1e}"
    bottom.set_title(f"|unfused − fused|,\n{most}" + (f", {equal} steps equal" if equal else ""))
    bottom.set_ylabel("nats per byte")
    bottom.set_xlabel("step")
    bottom.set_xlim(-0.02 * len(differences), 1.02 * len(differences))
    figure.align_ylabels()


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _draw_races(figure: SubFigure, races: Sequence[Race]) -> None:
    dtypes = list(dict.fromkeys(race.dtype for race in races))
    names = list(dict.fromkeys(race.name for race in races))
    grid = figure.subplots(len(names), len(dtypes), squeeze=False)
    for race in races:
        axes = grid[names.index(race.name)][dtypes.index(race.dtype)]
        _draw_race(axes, race)
    for axes in grid[-1]:
        axes.set_xlabel("milliseconds")
    figure.supxlabel(
        "bar: median; dot: one run; ×: median and quartiles of pairs that ran in turn", fontsize=9, color=UNFUSED
    )


def _draw_race(axes: Axes, race: Race) -> None:
    series = [[1e3 * s for s in race.fused], [1e3 * s for s in race.unfused]]
    spreads = [Spread.of(milliseconds) for milliseconds in series]
    # The axis starts at zero, so that the eye sees the share saved. It may end before the slowest runs: on a busy
    # machine, one of these would squeeze everything else together.
    end = max(max(1.25 * s.median, min(2 * s.median, s.high + 2 * (s.high - s.low))) for s in spreads)
    for height, milliseconds, spread, color in zip((0, 1), series, spreads, (FUSED, UNFUSED), strict=True):
        # A fixed fan instead of random jitter: the same numbers give the same picture.
        fan = [height + 0.3 * ((i * 0.618) % 1 - 0.5) for i in range(len(milliseconds))]
        axes.scatter(milliseconds, fan, s=12, color=color, alpha=0.45, linewidths=0)
        axes.plot([spread.median] * 2, [height - 0.32, height + 0.32], color=color, linewidth=2.5)
        beyond = sum(ms > end for ms in milliseconds)
        label = f"{spread.median:.3g} ms" + (f", {beyond} off the axis" if beyond else "")
        axes.text(0.01 * end, height + 0.44, label, ha="left", va="center", fontsize=9, color=color)
    axes.set_xlim(0, end)
    axes.set_ylim(-0.6, 1.7)
    axes.set_yticks([0, 1], ["fused", "unfused"])
    axes.tick_params(axis="y", length=0)
    speed_up = race.speed_up
    axes.set_title(f"{race.name}, {race.dtype}\n×{speed_up.median:.2f} ({speed_up.low:.2f}–{speed_up.high:.2f})")
