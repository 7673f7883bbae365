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
        len(works), len(tables), figsize=(3.3 * len(tables), 2.5 * len(works)), sharey=True, sharex=True, squeeze=False
    )
    for column, table in enumerate(tables):
        measured = {row["work"] for row in table["rows"]}
        for line, work in enumerate(works):
            axis = axes[line][column]
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
            if line == 0:
                name, _, rest = table["title"].removesuffix(", in ms").partition(", ")
                axis.set_title(f"{name}\n{rest}".replace(", its", ",\nits"), fontsize=8)
            if column == 0:
                axis.set_ylabel(f"{work}\n× eager")
            if measured.isdisjoint(works[line + 1 :]):
                axis.set_xlabel("tokens")
                axis.tick_params(labelbottom=True)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "model.png", dpi=110)


if __name__ == "__main__":
    main()
