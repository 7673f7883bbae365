"""Writes docs/performance.md, and the results in docs/cuda.md, from docs/results, after every measurement.

python tests/benchmarks/page.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = RESULTS.parent / "performance.md"
PAGE_OF_GPUS = RESULTS.parent / "cuda.md"
BETWEEN = "<!-- tests/benchmarks/page.py writes from here -->\n", "<!-- to here -->\n"
FUSED = "fuseplug"
PEAK = "peak, MB"
LOSES = 0.99
"""A lower ratio counts as a loss. Two runs of one model, by turns, differ by about as much."""

Rows = list[dict[str, Any]]


class Section(NamedTuple):
    """A heading, the text below it, and the tables: a file of docs/results, and how the tables' titles begin."""

    heading: str
    text: str
    file: str
    titles: tuple[str, ...] = ("",)
    picture: str = ""


HEAD = """\
# Performance

This page shows what Fuseplug gains on a CPU, and where it loses, for users who want to know what to expect. `nox -s
bench-models` measures whole models again, `nox -s bench` measures everything else, and both write the page. [Results on
a GPU](cuda.md#results) are on another page. There are no speeds of [NPUs](ascend.md).

**Method.** In each table the contenders take turns, so that a busy moment of the machine meets all of them. Results
are checked before anything is timed. A number like × 1.34 says how many times as fast as the eager model a contender
is: the median of the ratios, turn by turn. Times are medians, with quartiles in parentheses. The files in
`docs/results` have all figures.
"""
OWN = """\
## Measure your own model

```bash
fuseplug bench qwen3-0.6b --layers 8 --tokens 512,2048 --vs compile --allow lazy_logits
```

The command builds a model with random weights, applies every installed kernel, and compares logits and gradients of the
fused and the unfused model with those in a wider dtype. It then times both by turns, prints medians, quartiles and peak
memory, and says where the time goes. A model is one of the short names `qwen3-0.6b`, `qwen3-30b-a3b` and
`llama-3-8b`, or whatever `fuseplug plan` takes: a `config.json`, a directory, a Hub id. Only the config is read.

| to | add |
|---|---|
| time inference | `--mode prefill,decode`: a prompt, and one more token after it |
| time less of a large model | `--layers 2` |
| compare with others | `--vs compile,liger`; `again` is the unfused model once more, which shows the noise |
| time each kernel by itself, in the model's own calls of every size, and see why it computed none | `--ops` |
| take more turns: by default each cell of the table has seven, and as many as fit into five seconds | `--seconds 20` |
| keep the figures | `--json` |

All contenders share one set of weights. A training step here is a forward and a backward, without an optimizer. The
command exits with 1 if the fused model is further from the truth than twice the unfused one's distance, or 16
roundings.
"""
MORE = """\
## What fusing more would gain

On a CPU, next to nothing. A residual and the norm after it in one pass, and the norms of q and k with their rotation in
one pass, made the fused models 0.99 to 1.01 times as fast, which is as much as two identical models differ (two cores
of an Intel Xeon; prompts and training of 512 and 2048 tokens, Qwen3-MoE in bfloat16 and Qwen3 in float32, and of 512
tokens, Qwen3 in bfloat16). `torch.compile` is faster with prompts because it runs no Python: at 512 tokens of
Qwen3-MoE it was ahead by 4.4 ms of 84, and eager code spent 3.6 of these in Python between the operations.

The norms of a decoded token gain nothing either. Between matmuls, for a row of 1024 in bfloat16, the eager norm takes
48 µs, `torch.nn.functional.rms_norm` 50, and a compiled program 10 more than the eager one in the same run.
"""
WITHOUT_AVX512 = """\
## Half precision without AVX-512

The tables above are of processors with AVX-512. On x86 without it, torch 2.13 multiplies bfloat16 and float16 in a
plain loop: behind a linear layer of 1024 × 4096, the gradient of 256 rows takes 7.65 s in bfloat16, and 0.07 s in
float32 (one core). There, the kernels of the loss and of the experts multiply in float32, block by block, and round
once. Forward and backward in bfloat16, on two cores of an AMD EPYC with AVX2, one call of the loss and the fastest of
three of the experts:

| | eager | fused |
|---|---|---|
| loss of 512 tokens, hidden 1024, 32,000 words | 166 s | 2.0 s |
| 8 experts, 2 for each of 128 tokens, hidden 512, inner 1024, `grouped_mm` | 1.14 s | 0.11 s |
| 64 experts, 4 for each of 128 tokens, hidden 256, inner 512, `grouped_mm` | 0.39 s | 0.15 s |

The other layers of a model stay as slow as they are. On such a machine a model trains fastest in float32.
"""
SECTIONS = (
    Section(
        "Whole models",
        "Every installed kernel is applied, with `allow=['lazy_logits']`. *eager again* is the unfused model a second "
        "time: how far its numbers are from 1 is the noise. `torch.compile` compiles the unfused model. Training is a "
        "forward and a backward. Decoding is of eight tokens in each turn, one by one, after the number of tokens that "
        "the table names; the time is that of one.",
        "model",
        picture="![How many times as fast as eager, by tokens](results/model.png)",
    ),
    Section("RMSNorm", "The whole module, as `apply_all` leaves it.", "rmsnorm"),
    Section(
        "Gated MLPs",
        "*Between the projections* is `fuseplug_swiglu.swiglu` called by itself, also at sizes that fused models leave "
        "to the original.",
        "swiglu",
    ),
    Section(
        "RoPE",
        "Rotated halves. [The file](results/rope.json) has the other variants.",
        "rope",
        ("RoPE of halves",),
    ),
    Section(
        "Mixture of experts",
        "Compared with `grouped_mm`, which transformers calls if nothing else is asked for.",
        "moe",
    ),
    Section(
        "The loss of a head",
        "Peaks of memory are those above hidden states, weight and gradients. `F.linear_cross_entropy` rounds the loss "
        "to bfloat16; the fused loss is float32.",
        "linear_cross_entropy",
    ),
    Section(
        "Linear attention and state spaces",
        "Each kernel's function, called by itself. Eager is the function of transformers that runs where no other "
        "library is installed. A step of a scan is that of a module, fused with `every_size=True`: the step of 1 × "
        "8192 channels is otherwise left to the original. Peaks of memory are those above arguments and gradients. "
        "Results and gradients are checked at the first 128 tokens.",
        "linear_attention",
    ),
    Section(
        "Start-up",
        "The tables time a process that imports Fuseplug, one that looks for kernels, and one that fuses a whole "
        "model. The first time on a machine, a C++ compiler builds some ten programs, as many at once as there are "
        "cores, and a header that they share. For inference, nothing with gradients is built or checked, and there are "
        "five programs. The tables *paid once* above have the time of `apply_all` on those models: no check was kept, "
        "and Inductor had compiled what the tables before them needed.",
        "startup",
    ),
    Section(
        "Planning",
        "The table times `apply_all` on models without memory: it walks through their modules, and decides about each "
        "kind of them. It checks nothing.",
        "planning",
        ("apply_all",),
    ),
)


def main() -> None:
    for path, text in ((PAGE, page()), (PAGE_OF_GPUS, page_of_gpus())):
        path.write_text(text)
        print(f"wrote {path}")


def page() -> str:
    """The text of docs/performance.md, from the files of results that exist."""
    there = [section for section in SECTIONS if (RESULTS / f"{section.file}.json").exists()]
    parts = [HEAD, _at_a_glance(there), _losses(there), *map(_section, there), WITHOUT_AVX512, MORE, OWN]
    return "\n".join(parts)


def page_of_gpus() -> str:
    """The text of docs/cuda.md, with the tables of gpu.json."""
    first, last = BETWEEN
    before, _, rest = PAGE_OF_GPUS.read_text().partition(first)
    after = rest.partition(last)[2]
    content = json.loads((RESULTS / "gpu.json").read_text())
    about = content["machine"]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("triton", "liger-kernel"))
    gpu = f"{about['gpu']}, driver {about['driver_version']}, CUDA {about['cuda']}, {versions}"
    lines = ["", f"*{gpu}; {_machine(about)}*"]
    for table in content["tables"][:-1]:  # the last table lists the time of every contender
        if table["rows"]:
            lines += ["", f"**{table['title']}**", "", *_plain(table["rows"])]
    return "".join((before, first, *(f"{line}\n" for line in [*lines, ""]), last, after))


def _section(section: Section) -> str:
    about, tables = _read(section)
    lines = [
        f"## {section.heading}",
        "",
        section.text,
        "",
        f"*{_machine(about)}*",
        *(["", section.picture] if section.picture else []),
    ]
    for title, rows in tables:
        if len(rows) == 1:
            lines += ["", f"**{title}**: {', '.join(map(_cell, rows[0].values()))}"]
        else:
            lines += ["", f"**{title}**", "", *(_pivoted(rows) if "contender" in rows[0] else _plain(rows))]
    return "\n".join([*lines, ""])


def _at_a_glance(sections: Iterable[Section]) -> str:
    """The largest size of each table about training in bfloat16: a line with the ratios, and the peaks of memory."""
    text = (
        "The last size of each table below, forward and backward in bfloat16. Small sizes gain less. *Others* is the "
        "fastest of what else was measured in the table."
    )
    lines = ["## At a glance", "", text, "", "| | at | fuseplug | others | peak, MB |", "|---|---|---|---|---|"]
    for title, rows in (table for section in sections for table in _read(section)[1]):
        ratio, subject = _ratio_column(rows), title.partition(", bfloat16")[0]
        trained = [row for row in rows if row.get("work", "train") == "train"]
        if not ratio or subject == title or not ("backward" in title or "work" in rows[0]):
            continue
        size = _keys(trained[-1])
        by_contender = {row["contender"]: row for row in trained if _keys(row) == size}
        fused = by_contender.pop(FUSED)
        usual = _usual(fused, rows, ratio)
        others = [row for name, row in by_contender.items() if row is not usual and name != "eager again"]
        best = max(others, key=lambda row: float(row[ratio]), default=None)
        beside = "" if best is None else f"× {best[ratio]:.2f} ({best['contender']})"
        peaks = f"{_number(fused[PEAK])}, {usual['contender']} {_number(usual[PEAK])}" if PEAK in fused else ""
        at = ", ".join(f"{key} {value}" for key, value in size.items() if key != "work")
        lines.append(f"| {subject} | {at} | × {fused[ratio]:.2f} | {beside} | {peaks} |")
    return "\n".join([*lines, ""])


def _losses(sections: Iterable[Section]) -> str:
    """A line for each table in which something fused is clearly slower, and the number of unclear cases."""
    lines, close = [], 0
    for title, rows in (table for section in sections for table in _read(section)[1]):
        ratio = _ratio_column(rows)
        slower = [row for row in rows if ratio and row.get("contender") == FUSED and row[ratio] < LOSES]
        clear = [row for row in slower if _apart(row, rows, ratio)]
        close += len(slower) - len(clear)
        cells = (f"{', '.join(map(' '.join, _keys(row).items()))}: × {row[ratio]:.2f}" for row in clear)
        lines += [f"| {title.rpartition(', in ')[0] or title} | {'; '.join(cells)} |"] if clear else []
    parts = []
    if lines:
        spread = f"These are slower than × {LOSES} of the unfused ones, and the quartiles of both lie apart:"
        parts += [spread, "", "| what | where |", "|---|---|", *lines, ""]
    if close:
        noise = (
            f"{close} other figures are below × {LOSES}, and their quartiles overlap with the unfused one's. Not all "
            "of that is noise: to leave a small call to the original "
            "[costs something, too](concepts.md#calls-that-are-too-small-to-gain), and a decoded token makes many."
        )
        parts += [noise, ""]
    none = [f"In no table below is a fused model or module slower than × {LOSES}.", ""]
    return "\n".join(["## Where it loses", "", *(parts or none)])


def _apart(row: Mapping[str, Any], rows: Rows, ratio: str) -> bool:
    """Whether the quartiles of *row* lie above those of the contender to which its ratio refers."""
    usual = _usual(row, rows, ratio)
    time = _time_column(row)
    return bool(row[time]["quartile_1"] > usual[time]["quartile_3"])


def _usual(row: Mapping[str, Any], rows: Rows, ratio: str) -> Mapping[str, Any]:
    """The row with which *row* is compared: that of the same size with a ratio of 1."""
    return next(other for other in rows if other[ratio] == 1.0 and _keys(other) == _keys(row))


def _read(section: Section) -> tuple[Mapping[str, Any], list[tuple[str, Rows]]]:
    content = json.loads((RESULTS / f"{section.file}.json").read_text())
    tables = [(table["title"], table["rows"]) for table in content["tables"] if table["rows"]]
    return content["machine"], [each for each in tables if each[0].startswith(section.titles)]


def _machine(about: Mapping[str, Any]) -> str:
    versions = about["versions"]
    return (
        f"{about['cpu']}, {about['cores']} cores; Python {about['python']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}; {about['date']}"
    )


def _keys(row: Mapping[str, Any]) -> dict[str, str]:
    """The cells before the contender's, by column: they say what was measured."""
    found = {}
    for column, cell in row.items():
        if column == "contender":
            break
        found[column] = str(cell)
    return found


def _ratio_column(rows: Rows) -> str:
    return next((column for column in rows[0] if column.startswith("× ")), "")


def _time_column(row: Mapping[str, Any]) -> str:
    return next(column for column, cell in row.items() if isinstance(cell, dict))


def _pivoted(rows: Rows) -> Iterator[str]:
    """Yield a line for each measured case. Each contender has a column, with its time, ratio and peak."""
    ratio = _ratio_column(rows)
    time = _time_column(rows[0])
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        cell = _cell(row[time]) + (f" × {row[ratio]:.2f}" if ratio and row[ratio] != 1.0 else "")
        cell += f", {_number(row[PEAK])} MB" if PEAK in row else ""
        lines.setdefault(tuple(_keys(row).values()), {})[row["contender"]] = cell
    keys = list(_keys(rows[0]))
    yield f"| {' | '.join([*keys, *contenders])} |"
    yield "|" + "---|" * (len(keys) + len(contenders))
    for key, cells in lines.items():
        yield f"| {' | '.join([*key, *(cells.get(each, '') for each in contenders)])} |"


def _plain(rows: Rows) -> Iterator[str]:
    yield f"| {' | '.join(rows[0])} |"
    yield "|" + "---|" * len(rows[0])
    for row in rows:
        yield f"| {' | '.join(map(_cell, row.values()))} |"


def _cell(cell: Any) -> str:
    if isinstance(cell, dict):
        return f"{_number(cell['median'])} ({_number(cell['quartile_1'])}–{_number(cell['quartile_3'])})"
    return _number(cell) if isinstance(cell, float) else _operation(str(cell))


def _operation(text: str) -> str:
    """*text*, with the profiler's operations set as code, and compiled programs without their digests."""
    text = re.sub(r"## Call CompiledFxGraph \w+ ##", "a compiled program", text)
    return re.sub(r"aten::\w+", r"`\g<0>`", text)


def _number(value: float) -> str:
    """*value* with three digits; from 100 on, as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
