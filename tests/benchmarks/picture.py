"""Draws docs/results/model.png from model.json: how many times as fast as eager each contender is, by tokens.

python tests/benchmarks/picture.py
"""

from __future__ import annotations

import json

import matplotlib as mpl
import matplotlib.pyplot as plt
from record import RESULTS

mpl.use("Agg")
STYLES = {"fuseplug": ("C0", "o-"), "torch.compile": ("C1", "s-"), "eager again": ("0.6", "x--")}
RATIO = "× eager, turn by turn"


def main() -> None:
    tables = [
        table for table in json.loads((RESULTS / "model.json").read_text())["tables"] if "work" in table["rows"][0]
    ]
    works = list(dict.fromkeys(row["work"] for table in tables for row in table["rows"]))
    figure, axes = plt.subplots(
        len(tables), len(works), figsize=(9, 1.9 * len(tables)), sharey=True, sharex=True, squeeze=False
    )
    for line, table in zip(axes, tables, strict=True):
        name, _, rest = table["title"].removesuffix(", in ms").partition(", ")
        measured = {row["work"] for row in table["rows"]}
        line[0].set_title(f"{name}: {rest}", fontsize=10, loc="left", pad=18)
        for axis, work in zip(line, works, strict=True):
            if work not in measured:
                axis.set_visible(False)
                continue
            axis.axhline(1, color="0.85", zorder=0)
            for contender, (colour, style) in STYLES.items():
                rows = [row for row in table["rows"] if row["work"] == work and row["contender"] == contender]
                axis.plot(
                    [str(row["tokens"]) for row in rows],
                    [row[RATIO] for row in rows],
                    style,
                    color=colour,
                    label=contender,
                )
            axis.spines[["top", "right"]].set_visible(False)
            axis.text(0.03, 1.04, work, transform=axis.transAxes, fontweight="bold")
            axis.set_xlabel("tokens")
            axis.tick_params(labelbottom=True)
        line[0].set_ylabel("× eager")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper right", ncols=len(STYLES), frameon=False)
    figure.tight_layout()
    figure.savefig(RESULTS / "model.png", dpi=150)


if __name__ == "__main__":
    main()
