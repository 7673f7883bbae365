"""Turns records of models and classes into an answer for each class and function of the census, and into totals."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .census import OPS, Census
from .checking import ELSEWHERE

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What is known of one class or, for rotations, of one function.

    Attributes:
        op: The op that it computes.
        folder: The folder of ``transformers.models`` in which it is written.
        name: Its name.
        how: ``"fused"``, ``"left alone"``, ``"no answer"``, ``"not built"``, or ``"not called"`` by any class.
        variants: The variants that were found, if fused; the reasons, if left alone.
        compared: Whether a model or instance in which it is fused and called was compared with itself unfused.
    """

    op: str
    folder: str
    name: str
    how: str
    variants: tuple[str, ...] = ()
    compared: bool = False


def answers(census: Census, records: Iterable[Record]) -> list[Answer]:
    """What *records* say of each class and function in *census*."""
    rows: dict[tuple[str, str, str], list[tuple[Record, Record]]] = {}
    silent: set[tuple[str, str, str]] = set()
    for record in records:
        for site in record.get("sites", ()):
            for key in census.keys(site):
                rows.setdefault(key, []).append((site, record))
        for site in record.get("unanswered", ()):
            silent |= set(census.keys(site))
    found = []
    for op in OPS:
        for folder, name in sorted(census.classes[op]):
            key = (op, folder, name)
            idle = (
                op == "rope"
                and "." not in name
                and not any(name in census.calls[c] for c in census.calls if c[0] == folder)
            )
            found.append(
                _answer(key, rows.get(key, ()), "no answer" if key in silent else "not called" if idle else "not built")
            )
    return found


def _answer(key: tuple[str, str, str], rows: Sequence[tuple[Record, Record]], otherwise: str) -> Answer:
    fused = [(site, record) for site, record in rows if site["fused"]]
    if fused:
        compared = any(site.get("called") and record["status"] == "checked" for site, record in fused)
        return Answer(*key, "fused", tuple(sorted({site["variant"] for site, _ in fused})), compared)
    if rows:
        return Answer(*key, "left alone", tuple(sorted({site["why"] for site, _ in rows})))
    return Answer(*key, otherwise)


def summary(census: Census, records: Sequence[Record]) -> dict[str, Any]:
    """The numbers of one release."""
    found = answers(census, records)
    models = [record for record in records if "model_type" in record]
    concerned = [record for record in models if is_concerned(record)]
    planning = sorted((r["planning"], r["model_type"]) for r in models if r.get("planning") and r.get("sites"))
    return {
        "ops": {op: _of_op([answer for answer in found if answer.op == op]) for op in OPS},
        "model types": {
            "registered": len(models),
            "with any of the ops": len(concerned),
            **Counter(record["status"] for record in concerned),
        },
        "sites": sum(site["count"] for record in models for site in record.get("sites", ())),
        "sites fused": sum(site["count"] for record in models for site in record.get("sites", ()) if site["fused"]),
        "planned elsewhere": {
            device: _planned([record["elsewhere"][device] for record in models if "elsewhere" in record])
            for device in ELSEWHERE
        },
        "sites without an answer": sum(len(record.get("unanswered", ())) for record in records),
        "mismatches": [record["model_type"] for record in models if record["status"] == "mismatch"],
        "planning": {
            "median": statistics.median(seconds for seconds, _ in planning),
            "worst": planning[-1][0],
            "worst in": planning[-1][1],
        }
        if planning
        else {},
    }


def _planned(plans: Sequence[Record]) -> dict[str, int]:
    """How many sites were planned to be fused by kernels of each kind."""
    return dict(sum((Counter(plan["fused"]) for plan in plans), Counter()))


def is_concerned(record: Record) -> bool:
    """Whether a model type has any of the ops, as far as is known."""
    told = record.get("sites") or record.get("unanswered") or record.get("concerned")
    return bool(told) or record["status"] == "died"


def _of_op(found: Sequence[Answer]) -> dict[str, int]:
    return {
        "of": len(found),
        "fused": sum(answer.how == "fused" for answer in found),
        "compared": sum(answer.compared for answer in found),
        "left alone": sum(answer.how == "left alone" for answer in found),
        "no answer": sum(answer.how == "no answer" for answer in found),
        "not built": sum(answer.how == "not built" for answer in found),
        "not called": sum(answer.how == "not called" for answer in found),
    }
