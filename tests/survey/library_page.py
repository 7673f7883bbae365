"""Renders docs/coverage-libraries.md from the records of classes and models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .checking import DTYPES
from .page import _NAMES, _percent, _share, _short, _table

_HEAD = """\
# Coverage of diffusers and timm

This page lists the norms and gated MLPs of diffusers and timm that Fuseplug fuses, those that it leaves alone, and why.
[Coverage](coverage.md) is the same for transformers.

`nox -s coverage-libraries` makes this page. Nobody lists the classes. Every class of the two libraries that can be
built small, by itself, is built, and it is listed if a kernel answers for it: with a proposal or with a reason. It is
then compared with itself unfused, on the CPU: outputs and gradients, in float32 and in bfloat16, within the same
tolerance as on [Coverage](coverage.md). *float32* and *bfloat16* show the share of the tolerance that was needed; more
than 1 would be a mismatch. Models are built small, from their configs, without weights of anybody's. They are planned,
not run. All records are in [coverage-libraries.json](coverage-libraries.json).
"""

Record = Mapping[str, Any]


def to_markdown(content: Mapping[str, Any]) -> str:
    """The page: numbers, classes that are fused, classes that are left alone, models."""
    about, classes, models = (content[name] for name in ("machine", "classes", "models"))
    versions = ", ".join(f"{name} {about[of][name]}" for of, name in _VERSIONS)
    parts = [_HEAD, f"{about['cpu']}, {about['cores']} cores, {versions}; {about['date']}.\n"]
    parts += [f"{content['partial']}\n"] if content.get("partial") else []
    parts.append("## Summary\n")
    parts += _table(("", "diffusers", "timm"), _summary(classes, models))
    parts += ["", "## Fused\n", *_table(("op", "class", "variant", "status", *DTYPES), _fused(classes))]
    parts += ["", "## Left alone\n", *_table(("op", "class", "why"), _left_alone(classes, models))]
    parts += ["", "## Models\n", *_table(("library", "model", "sites", "fused", "left alone"), _models(models))]
    rest = [record["model"] for record in models if record.get("status") == "planned" and not record["sites"]]
    parts += ["", f"No such norm or MLP in {len(rest)} others: {', '.join(rest)}."]
    unbuilt = ((r["library"], r["model"], _short(r["why"])) for r in models if r["status"] != "planned")
    parts += ["", "## Not built\n", *_table(("library", "model", "why"), unbuilt)]
    return "\n".join(parts) + "\n"


_VERSIONS = (("versions", "torch"), ("libraries", "diffusers"), ("libraries", "timm"))


def _summary(classes: Sequence[Record], models: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    def row(name: str, count: Any) -> tuple[str, ...]:
        return (name, *(count(library) for library in ("diffusers", "timm")))

    for op in dict.fromkeys(record["op"] for record in classes):
        of = {
            lib: [r for r in classes if r["op"] == op and r["module"].startswith(lib)] for lib in ("diffusers", "timm")
        }
        yield row(
            f"{_NAMES[op]}: fused", lambda lib, of=of: f"**{sum(r['fused'] for r in of[lib])}** of {len(of[lib])}"
        )
        done = {lib: sum(r["status"] == "checked" for r in records) for lib, records in of.items()}
        yield row(f"{_NAMES[op]}: compared", lambda lib, done=done: str(done[lib]))
    wrong = [record for record in classes if record["status"] == "mismatch"]
    yield row("mismatches", lambda lib: f"**{sum(r['module'].startswith(lib) for r in wrong)}**")
    yield row("models", lambda lib: str(sum(r["library"] == lib and r["status"] == "planned" for r in models)))
    sites = {
        lib: [s for r in models if r["library"] == lib for s in r.get("sites", ())] for lib in ("diffusers", "timm")
    }
    yield row("sites in them", lambda lib: str(sum(s["count"] for s in sites[lib])))
    fused = {lib: sum(s["count"] for s in found if s["fused"]) for lib, found in sites.items()}
    yield row("… fused", lambda lib: f"{fused[lib]} ({_percent(fused[lib], sum(s['count'] for s in sites[lib]))})")


def _fused(classes: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    for record in classes:
        if record["fused"]:
            shares = (_share(record.get(dtype, {})) for dtype in DTYPES)
            yield (_NAMES[record["op"]], _named(record), record["answer"], record["status"], *shares)


def _left_alone(classes: Sequence[Record], models: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    alone = {(r["op"], _named(r)): r["answer"] or r.get("why", "") for r in classes if not r["fused"]}
    fused = {(r["op"], _named(r)) for r in classes if r["fused"]}
    for site in (site for record in models for site in record.get("sites", ())):
        if not site["fused"]:
            where = " (in some models)" if (site["op"], _named(site)) in fused else ""
            alone.setdefault((site["op"], _named(site) + where), site["answer"])
    yield from ((_NAMES[op], name, _short(why)) for (op, name), why in sorted(alone.items()))


def _models(models: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    for record in models:
        if sites := record.get("sites"):
            total, fused = sum(s["count"] for s in sites), Counter[str]()
            for site in sites:
                if site["fused"]:
                    fused[site["answer"]] += site["count"]
            left = Counter({site["class"]: site["count"] for site in sites if not site["fused"]})
            yield (record["library"], record["model"], str(total), _counted(fused), _counted(left))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _named(record: Record) -> str:
    return f"{record['module']}: {record['class']}"
