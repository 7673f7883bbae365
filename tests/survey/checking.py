"""One model type: what is fused in it and what is not, and whether it computes what it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug import KernelManager, Report

from .build import NoModel, build
from .census import Census
from .feeding import Inputs, inputs_for, step
from .jitter import one_rounding

ROUNDINGS = 16
"""What a tensor of a fused model may be from its unfused value, as a share of its size: so many roundings, and"""

TIMES = 4
"""so many times what the model itself moves by if every fused result is another by one rounding."""


def check(manager: KernelManager, census: Census, model_type: str) -> dict[str, Any]:
    """The record of *model_type*: plain data."""
    record: dict[str, Any] = {"model_type": model_type}
    start = time.perf_counter()
    try:
        model = build(model_type)
    except NoModel as error:
        return record | {"status": "no model", "why": str(error)}
    except Exception as error:
        return record | {"status": "not built", "why": said(error)}
    report = manager.plan(model).report
    record |= {
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "planning": report.seconds,
        "sites": sites(model, report),
        "unanswered": census.unanswered(model, report),
    }
    if not (record["sites"] or record["unanswered"]):
        return record | {"status": "nothing to fuse"}
    record |= compared(manager, model, report)
    return record | {"seconds": time.perf_counter() - start}


def sites(model: nn.Module, report: Report) -> list[dict[str, Any]]:
    """The answers of *report*, those of alike sites counted together."""
    found: Counter[tuple[str, ...]] = Counter()
    for entry in report.entries:
        module = model.get_submodule(entry.paths[0])
        answer = f"{entry.kernel_id} {entry.variant}" if entry.fused else entry.why_not
        found[
            entry.op, type(module).__module__, type(module).__name__, str(entry.target or ""), answer, str(entry.fused)
        ] += 1
    keys = ("op", "module", "class", "target", "answer")
    return [
        dict(zip(keys, row, strict=False)) | {"fused": row[-1] == "True", "count": count}
        for row, count in found.items()
    ]


def compared(manager: KernelManager, model: nn.Module, report: Report, inputs: Inputs | None = None) -> dict[str, Any]:
    """How *model* compares with itself, unfused and fused, in float32 and in bfloat16."""
    fused = {entry.paths[0] for entry in report.fused}
    if not fused:
        return {"status": "nothing fused"}
    try:
        inputs = inputs_for(model) if inputs is None else inputs
    except RuntimeError as error:
        return {"status": "not run", "why": str(error)}
    record: dict[str, Any] = {"inputs": list(inputs), "exercised": [len(called(model, inputs, fused)), len(fused)]}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        try:
            record[name] = comparison(manager, model.to(dtype), inputs)
        except Exception as error:
            record[name] = {"error": said(error)}
    failed = [n for n in ("float32", "bfloat16") if record[n].get("wrong") or record[n].get("undo") is False]
    unknown = [n for n in ("float32", "bfloat16") if "error" in record[n]]
    return record | {"status": "mismatch" if failed else "not compared" if unknown else "checked"}


def comparison(manager: KernelManager, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The largest distance of any tensor, as a share of what is allowed, and every tensor that is beyond it."""
    before = step(model, inputs)
    again = step(model, inputs)
    with manager.apply_all(model) as applied:
        fused = step(model, inputs)
        modules = [model.get_submodule(entry.paths[0]) for entry in applied.report.fused]
    after = step(model, inputs)
    with one_rounding(dict.fromkeys(modules)):
        moved = step(model, inputs)
    shares = {name: _share(fused.get(name), value, moved.get(name)) for name, value in before.items()}
    shares |= {name: float("inf") for name in fused.keys() - before.keys()}
    worst = max(shares, key=shares.__getitem__)
    return {
        "tensors": len(before),
        "worst": shares[worst],
        "where": worst,
        "wrong": sorted(name for name, share in shares.items() if not share <= 1),
        "undo": _same(before, after),
        "reproducible": _same(before, again),
    }


def called(model: nn.Module, inputs: Inputs, paths: set[str]) -> set[str]:
    """Those of *paths* whose modules are called."""
    found: set[str] = set()
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: found.add(path)) for path in paths
    ]
    step(model, inputs)
    for handle in handles:
        handle.remove()
    return found


def _share(found: Tensor | None, true: Tensor, moved: Tensor | None) -> float:
    if found is None or moved is None or found.shape != true.shape or found.dtype != true.dtype:
        return float("inf")
    if not torch.equal(found.isfinite(), true.isfinite()):
        return float("inf")
    found, wide, moved = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (found, true, moved))
    allowed = ROUNDINGS * torch.finfo(true.dtype).eps * wide.norm() + TIMES * (moved - wide).norm()
    distance = (found - wide).norm()
    return 0.0 if distance == 0 else (distance / allowed).item()


def _same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value.nan_to_num(), right[name].nan_to_num()) for name, value in left.items()
    )


def said(error: Exception) -> str:
    """What *error* says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
