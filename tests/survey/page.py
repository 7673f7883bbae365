"""Renders the records as docs/coverage.json, and for people as docs/coverage.md."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fuseplug.patching.guard import OUTSIDE

from .census import LOSS, OPS
from .checking import DTYPES
from .collect import is_concerned
from .in_use import DTYPES as AUTOCASTS
from .kernel_kinds import KERNEL_KINDS

_NAMES = {
    "rmsnorm": "norms",
    "swiglu": "gated MLPs",
    "rope": "rotary functions",
    "moe": "experts",
    "linear_cross_entropy": "losses of heads",
    "causal_conv1d": "causal convolutions",
    "gated_delta_rule": "gated delta rules",
    "selective_scan": "selective scans",
    "ssd": "chunk scans",
}
_WITH_A_COLUMN = ("rmsnorm", "swiglu", "rope", "moe")
"""The ops that most models have. The others, which are in models of few types, share a column."""
_NUMBERS = {4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}
_MOST_CHARACTERS = 300
_MOST_NAMES = 6
_HEAD = """\
# Coverage

This page lists what Fuseplug fuses in every model type of transformers, what it leaves alone, and why. It is for users
who want to know about one model, and for contributors who look for gaps.

`nox -s coverage` makes this page. It builds each model type small, from its config, on the CPU. It fuses the model with
the {ops} Inductor kernels and compares it with itself unfused: outputs and the gradient of every parameter, in float32
and in bfloat16. Then it undoes the fusion and compares bit by bit. Small calls are normally left
to the originals; here the kernels compute them all, compiled. The tests check a random sample of the page. All records
are in [coverage.json](coverage.json).

* A **class** counts as fused if Fuseplug chose a kernel for it, in a model or on its own, after it had found which of
  the known variants the class computes. For rotations, the functions that the classes call are counted.
* A class counts as **compared** if it was called, in a model or on its own, and the results were those of the unfused
  one.{losses}
* The **tolerance** for a tensor is {roundings} of its size, plus {times} times the change that results
  from moving every fused result by one rounding; for a parameter's gradient, plus one rounding of the largest gradient
  of the same call, because a gradient that is truly zero is the difference of others. The column *compared* shows the
  largest share of the tolerance that any tensor of the model needed, in float32 and in bfloat16. More than 1 would be
  a mismatch.
* **Under autocast** shows how many calls the kernels computed in a forward and backward under `torch.autocast` to
  bfloat16, then to float16, with weights in float32, as mixed precision trains; *not run* where that was not tried.
  One number stands for both dtypes if it is the same.
* **Planned for** shows what `plan` decides for the same models on an Ascend NPU (`npu`) or a GPU (`cuda`). Variants are
  found by running the modules on the CPU.
* **Run without their devices** is the same comparison for the other kernels, without a chip and without a GPU. Those
  for NPUs ran with torch_npu's own schemas, limits and autograd formulas, and references on the CPU computed the
  operations. Those for GPUs ran in Triton's interpreter.
"""
_LOSSES = """ A model whose forward takes labels was also called with some, and its loss and the gradients of that were
  compared. For this, the survey agrees to lazy logits."""


def to_json(releases: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """The JSON, with one record to a line, so that records can be compared line by line."""
    lines = ["{", f' "machine": {json.dumps(about)},', ' "releases": {']
    for number, (release, content) in enumerate(releases.items()):
        parts = (f"   {json.dumps(key)}: {_lines(value)}" for key, value in content.items())
        lines += [f'  "{release}": {{', ",\n".join(parts), "  }" + ("," if number < len(releases) - 1 else "")]
    return "\n".join([*lines, " }", "}", ""])


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
    return f"[\n{rows}\n   ]"


def to_markdown(
    releases: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any], roundings: Mapping[Any, int], times: int
) -> str:
    """The summary, what is left alone and why, then each model type."""
    said = " or ".join(
        f"{number} roundings in {str(dtype).removeprefix('torch.')}" for dtype, number in roundings.items()
    )
    ops = [op for op in OPS if any(op in content["summary"]["ops"] for content in releases.values())]
    losses = _LOSSES if LOSS in ops else ""
    head = _HEAD.format(roundings=said, times=times, ops=_NUMBERS[len(ops)], losses=losses)
    parts = [head, _machine(about), "## Summary\n", *_summary(releases)]
    for release, content in releases.items():
        if runs := without_devices(content):
            parts += ["", f"## Run without their devices on transformers {release}", "", *_runs(runs)]
        parts += ["", f"## Left alone on transformers {release}", "", *_left_alone(content["answers"])]
        if there := sorted(_left_alone_elsewhere(content["records"])):
            parts += ["", f"## Fused on CPUs, planned to be left alone elsewhere on transformers {release}", ""]
            parts += _table(("device", "op", "class", "why"), there)
        parts += ["", f"## Not compared on transformers {release}", "", *_not_compared(content["records"])]
        if any(map(_autocast, content["records"])):
            parts += ["", f"## Left to the originals under autocast on transformers {release}", ""]
            parts += _originals_under_autocast(content["records"])
        parts += ["", f"## Model types of transformers {release}", "", _recorded(content["records"]), *_models(content)]
    return "\n".join(parts) + "\n"


def _machine(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if name == "torch")
    return f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, {versions}; {about['date']}.\n"


def _summary(releases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    cells = {release: dict(_cells(content["summary"])) for release, content in releases.items()}
    names = dict.fromkeys(name for of_release in cells.values() for name in of_release)
    rows = ([name, *(of_release.get(name, "not run") for of_release in cells.values())] for name in names)
    yield from _table(("transformers", *releases), rows)


def _cells(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names and contents of a release's rows in the summary."""
    for op, numbers in summary["ops"].items():
        yield f"{_NAMES[op]}: fused", f"**{numbers['fused']}** of {numbers['of']}"
        yield f"{_NAMES[op]}: compared", f"{numbers['compared']}"
    types, sites = summary["model types"], summary["sites"]
    concerned, checked = types["with any of the ops"], types.get("checked", 0)
    yield "model types", str(types["registered"])
    yield "… with any of the ops", str(concerned)
    yield "… compared", f"**{checked}** ({_percent(checked, concerned)})"
    yield "mismatches", f"**{len(summary['mismatches'])}**"
    yield "sites in their models", str(sites)
    yield "… fused", f"{summary['sites fused']} ({_percent(summary['sites fused'], sites)})"
    yield "… without an answer", f"**{summary['sites without an answer']}**"
    for device, kinds in summary["planned elsewhere"].items():
        number, by = sum(kinds.values()), ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        yield f"… fused, planned for {device}", f"{number} ({_percent(number, sites)}): {by}"
    planning = summary["planning"]
    yield "planning a small model, median", f"{planning['median']:.2f} s"
    yield "planning a small model, worst", f"{planning['worst']:.2f} s ({planning['worst in']})"


def without_devices(content: Mapping[str, Any]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The records of each kind of kernel that ran without its device."""
    return {kind: content[f"by {kind}"] for kind in KERNEL_KINDS if f"by {kind}" in content}


def _runs(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """The results of kernels for other devices, on the models that were compared with Inductor's kernels."""
    rows, rest = [], []
    for kind, records in runs.items():
        done = [record for record in records if record["status"] == "checked"]
        worst = [_share(max((r.get(dtype, {}) for r in done), key=lambda c: c.get("worst", 0))) for dtype in DTYPES]
        wrong = sum(record["status"] == "mismatch" for record in records)
        fused = sum(record["fused"] for record in done)
        rows.append(
            (KERNEL_KINDS[kind].description, f"**{len(done)}** of {len(records)}", str(fused), f"**{wrong}**", *worst)
        )
        rest += [
            (kind, record["status"], _short(record.get("why") or "; ".join(_errors(record))), record["model_type"])
            for record in records
            if record["status"] != "checked"
        ]
    columns = (
        "kernels",
        "model types compared",
        "sites fused in these",
        "mismatches",
        *(f"worst, {d}" for d in DTYPES),
    )
    yield from _table(columns, rows)
    if rest:
        yield ""
        yield from _table(("kernels", "status", "why", "model types"), _together(rest))


def _left_alone(answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        (_NAMES[each["op"]], f"{each['folder']}: {each['name']}", _short("; ".join(each["variants"]) or each["how"]))
        for each in answers
        if each["how"] != "fused"
    ]
    yield from _table(("op", "class", "why"), rows)


def _left_alone_elsewhere(records: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, str, str]]:
    found = set()
    for record in records:
        left_alone = {_place(site) for site in record.get("sites", ()) if not site["fused"]}
        for device, plan in record.get("elsewhere", {}).items():
            found |= {
                (device, _NAMES[site["op"]], f"{site['folder']}: {site['class']}", _short(site["why"]))
                for site in plan["left alone"]
                if _place(site) not in left_alone
            }
    return found


def _place(site: Mapping[str, Any]) -> tuple[str, ...]:
    return site["op"], site["folder"], site["class"], site["target"]


def _not_compared(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        (record["status"], _short(record.get("why") or "; ".join(_errors(record))), record["model_type"])
        for record in records
        if "model_type" in record and is_concerned(record) and record["status"] not in ("checked", "nothing fused")
    ]
    yield from _table(("status", "why", "model types"), _together(rows))


def _errors(record: Mapping[str, Any]) -> Iterator[str]:
    for dtype in DTYPES:
        compared = record.get(dtype, {})
        if why := compared.get("error", compared.get("unfused")):
            yield f"{dtype}: {why.partition(' [ERROR] ')[0]}"  # torch_npu appends the time and the process


def _models(content: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    rest = []
    known = [op for op in OPS if op in content["summary"]["ops"]]
    for record in content["records"]:
        if "model_type" not in record:
            continue
        if not is_concerned(record):
            rest.append(record["model_type"])
        elif record.get("sites"):
            ops = [_of_op(record, op) for op in known if op in _WITH_A_COLUMN]
            others = {_NAMES[op]: _of_op(record, op) for op in known if op not in _WITH_A_COLUMN}
            ops.append("; ".join(f"{name}: {sites}" for name, sites in others.items() if sites))
            compared = [record["status"]] if record["status"] != "checked" else []
            compared += filter(None, (_share(record.get(dtype, {})) for dtype in DTYPES))
            in_use = dict.fromkeys(_in_use(_autocast(record).get(dtype, {})) for dtype in AUTOCASTS)
            rows.append((record["model_type"], *ops, ", ".join(compared), "; ".join(in_use)))
    ops = (_NAMES[op] for op in known if op in _WITH_A_COLUMN)
    yield from _table(("model type", *ops, "others", "compared", "under autocast"), rows)
    yield from ("", f"None of the {_NUMBERS[len(known)]} ops in {len(rest)} others: {', '.join(rest)}.")


def _recorded(records: Sequence[Mapping[str, Any]]) -> str:
    """The days on which *records* were made, because not all come from one run."""
    days = Counter(record.get("recorded", "") for record in records)
    parts = [f"{count} on {day}" for day, count in sorted(days.items(), reverse=True) if day]
    return f"Of {len(records)} records, {', '.join(parts)}; the others earlier.\n" if parts else ""


def _autocast(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Who computes the calls of *record* under autocast, by dtype and op; empty if autocast was not tried."""
    found: Mapping[str, Any] = record.get(DTYPES[0], {}).get("autocast", {})
    return found


def _in_use(by_op: Mapping[str, Any]) -> str:
    if not by_op:
        return "not run"
    if "unfused" in by_op:
        return "does not run unfused"
    kernels = sum(row["kernel"] for row in by_op.values())
    return f"{kernels} of {kernels + sum(map(_originals, by_op.values()))}"


def _originals_under_autocast(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The calls that originals compute under autocast, and why; the table of models has their number for each model."""
    calls: dict[tuple[str, str, str], dict[str, int]] = defaultdict(dict)
    for record in records:
        if "model_type" not in record:
            continue
        for dtype, by_op in _autocast(record).items():
            if "unfused" in by_op:
                continue
            for op, row in by_op.items():
                reasons = [reason for reason in row["why"] if reason != OUTSIDE]
                if reasons and (originals := _originals(row)):
                    calls[_NAMES[op], dtype, _short("; ".join(reasons))][record["model_type"]] = originals
    most_first = sorted(calls.items(), key=lambda item: -sum(item[1].values()))
    rows = ((*place, str(sum(of_types.values())), _few([*of_types])) for place, of_types in most_first)
    yield from _table(("op", "to", "why", "calls", "model types"), rows)


def _few(names: Sequence[str]) -> str:
    """*names*; if there are many, their number and the first two."""
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)}: {names[0]}, {names[1]} …"


def _originals(row: Mapping[str, Any]) -> int:
    """The original's calls that a kernel could have computed: none if all were outside the scope of a fused loss."""
    return 0 if row["why"] == [OUTSIDE] else row["original"]


def _share(compared: Mapping[str, Any]) -> str:
    return (
        f"{compared['worst']:.2f}" if "worst" in compared else "does not run unfused" if "unfused" in compared else ""
    )


def _of_op(record: Mapping[str, Any], op: str) -> str:
    found: dict[str, int] = {}
    for site in record["sites"]:
        if site["op"] == op:
            name = site["variant"] if site["fused"] else "left alone"
            found[name] = found.get(name, 0) + site["count"]
    return ", ".join(f"{count} {name}" for name, count in found.items())


def _short(why: str) -> str:
    """*why* without the names of kernels, which are all Inductor's; a long text is cut off."""
    why = re.sub(r"inductor_fused_\w+: ", "", why)
    return why if len(why) <= _MOST_CHARACTERS else f"{why[:_MOST_CHARACTERS]}…"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def _together(rows: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """One row for all *rows* that differ in their last cell only, with all of these cells."""
    last: dict[tuple[str, ...], list[str]] = {}
    for *cells, name in rows:
        last.setdefault(tuple(cells), []).append(name)
    yield from ((*cells, ", ".join(names)) for cells, names in last.items())


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_cell(cell) for cell in row)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
