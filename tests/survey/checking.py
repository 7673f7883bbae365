"""One model type: what is fused in it and what is not, and whether it still computes the same."""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from fuseplug import KernelManager, Report, Target
from fuseplug.report import Entry

from .build import NoModel, build
from .census import LOSS, OPS, Census, located, ops_of
from .feeding import Call, called, step
from .in_use import raised_under_autocast, under_autocast
from .jitter import one_rounding
from .labels import all_calls

Site = dict[str, Any]

ROUNDINGS = {torch.float32: 16, torch.bfloat16: 4}
"""By how many roundings a tensor of a fused model may differ from its unfused value, as a share of its size."""

TIMES = 4
"""Added to this: so many times the distance that the model moves if every fused result moves by one rounding."""

DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in ROUNDINGS)
"""The names of the dtypes, under which a record has the findings for each."""

ELSEWHERE = ("npu", "cuda")
"""The devices that are not here, but for which plans are made, too."""

ALLOW = ("lazy_logits",)
"""The consents that the survey gives: all, so that it sees every kernel."""

FEWEST_DRAWS, MOST_DRAWS = 3, 16
"""How often that distance is drawn, at least and at most.

The largest counts, because it is a matter of chance how far a single number moves, or whether an expert is chosen.
"""


def check(
    manager: KernelManager,
    census: Census,
    model_type: str,
    device: str = "cpu",
    others: Sequence[str] = ELSEWHERE,
    plan_only: bool = False,
) -> dict[str, Any]:
    """The record of *model_type*, fused and compared on *device*, and planned for *others*: plain data.

    With *plan_only*, no kernel is run, and the status of a model that is built is ``"planned"``. Otherwise it is
    ``"checked"``; ``"mismatch"``; ``"not compared"``, if a step raised, in bfloat16 a fused one; ``"not run"``, if no
    call was found; ``"nothing fused"``; ``"nothing to fuse"``; ``"not built"``; or ``"no model"``.
    """
    record: dict[str, Any] = {"model_type": model_type}
    start = time.perf_counter()
    try:
        model = build(model_type)
    except NoModel as error:
        return record | {"status": "no model", "why": str(error)}
    except Exception as error:
        concerned = census.concerns(CONFIG_MAPPING[model_type])
        return record | {"status": "not built", "why": said(error), "concerned": concerned}
    record |= {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    if plan_only:
        report = manager.plan(model, verify=False, allow=ALLOW).report
        silent = census.unanswered(model, report)
        return record | {"status": "planned", "sites": sites(model, report), "unanswered": silent}
    # A second model for the device, because some models, once called, keep tensors that do not move with them.
    there = model if device == "cpu" else build(model_type).to(device)
    record |= _planned_and_compared(manager, census, model, there, others)
    return record | {"seconds": time.perf_counter() - start}


def _planned_and_compared(
    manager: KernelManager, census: Census, model: nn.Module, there: nn.Module, others: Sequence[str]
) -> dict[str, Any]:
    """The findings for *there*, which is fused; calls for it are found by trying *model*, which is on the CPU."""
    report = manager.plan(there, verify=False, allow=ALLOW).report
    found: dict[str, Any] = {"unanswered": census.unanswered(model, report)}
    if not (report.entries or found["unanswered"]):
        return {"status": "nothing to fuse"}
    if others:
        found["elsewhere"] = {other: elsewhere(manager, model, other) for other in others}
    try:
        calls = all_calls(model, {entry.paths[0] for entry in report.entries})
    except RuntimeError as error:
        return found | planned(manager, there) | {"status": "not run", "why": str(error)}
    return found | {"calls": [str(call) for call in calls]} | compared(manager, there, calls)


def planned(manager: KernelManager, model: nn.Module, verify: bool = True) -> dict[str, Any]:
    """What would be fused in *model*; without *verify*, no kernel is run."""
    report = manager.plan(model, verify=verify, allow=ALLOW).report
    return {"planning": report.seconds, "sites": sites(model, report)}


def elsewhere(manager: KernelManager, model: nn.Module, device: str) -> dict[str, Any]:
    """How many sites of *model* would be fused on *device*, by kernels of each kind, and what would be left alone."""
    report = manager.plan(model, device=device, allow=ALLOW).report
    by = (
        "part of what is fused" if each.covered_by else str(each.kernel_id).partition("_")[0]
        for each in report.entries
        if each.fused or each.covered_by
    )
    return {"fused": Counter(by), "left alone": [site for site in sites(model, report) if not site["fused"]]}


def compared(manager: KernelManager, model: nn.Module, calls: Sequence[Call]) -> dict[str, Any]:
    """What is fused in *model*, and how its results compare in each dtype in which it runs unfused."""
    found: dict[str, Any] = {}
    for dtype, name in zip(ROUNDINGS, DTYPES, strict=True):
        report = None
        try:
            step(model.to(dtype), calls)
        except Exception as error:
            found[name] = {"unfused": said(error)}
        else:
            try:
                report, found[name] = comparison(manager, model, calls)
            except Exception as error:
                found[name] = {"error": said(error)}
        if dtype is torch.float32:
            report = report or manager.plan(model, allow=ALLOW).report
            made = calls if "unfused" not in found[name] else ()
            # A head is replaced only in calls with labels.
            paths = {path for entry in report.entries for path in entry.paths}
            anyhow = called(model, made, paths)
            training = called(model, [call for call in made if call.loss], paths)
            reached = {(op, path) for op in OPS for path in (training if op == LOSS else anyhow)}
            found |= {"planning": report.seconds, "sites": sites(model, report, reached)}
    return found | {"status": _status(found)}


def _status(found: Mapping[str, Any]) -> str:
    compared = [found[name] for name in DTYPES]
    if not any(site["fused"] for site in found["sites"]):
        return "nothing fused"
    if any(each.get("wrong") or each.get("undo") is False for each in compared):
        return "mismatch"
    run = "wrong" in compared[0] and not any("error" in each for each in compared)
    return "checked" if run else "not compared"


def sites(model: nn.Module, report: Report, called: Collection[tuple[str, str]] = ()) -> list[Site]:
    """The answers of *report*, with equal sites counted together; *called* has the ops and paths that a step called."""
    found: Counter[tuple[tuple[str, Any], ...]] = Counter()
    calls: Counter[tuple[tuple[str, Any], ...]] = Counter()
    every = [(entry, op) for entry in report.entries for op in ops_of(entry, report)]
    for entry, op in every:
        cls = type(model.get_submodule(entry.paths[0]))
        folder, name = located(cls)
        site: Site = {"op": op, "folder": folder, "class": name, "target": str(entry.target or "")}
        if entry.fused or entry.covered_by:
            site |= {"fused": True, "variant": entry.variant or "part of what is fused"}
        else:
            site |= {"fused": False, "why": entry.why_not}
        if helpers := _called_by(cls, entry.target):
            site["calls"] = helpers
        found[tuple(site.items())] += 1
        calls[tuple(site.items())] += any((op, path) in called for path in entry.paths)
    return [dict(site) | {"count": count, "called": calls[site]} for site, count in found.items()]


def _called_by(cls: type, target: Target | None) -> tuple[str, ...]:
    """The functions of its own file that the function in *target* calls: a rotation may be written as two functions."""
    if target is None or target.function is None:
        return ()
    names = vars(sys.modules[cls.__module__])
    code = getattr(inspect.unwrap(names[target.function]), "__code__", None)
    return tuple(name for name in (code.co_names if code else ()) if inspect.isfunction(names.get(name)))


def comparison(manager: KernelManager, model: nn.Module, calls: Sequence[Call]) -> tuple[Report, dict[str, Any]]:
    """What is fused, and how far that moves the results of a step.

    The record has the largest share of its tolerance that any tensor needed, and the names of tensors that exceed
    theirs; for a model in float32, also who computes the calls under autocast.
    """
    # Before the first step: Wav2Vec2-Conformer keeps a table of positions in the dtype of the last call.
    unfused = raised_under_autocast(model, calls) if _is_float32(model) else None
    before = step(model, calls)
    again = step(model, calls)
    with manager.apply_all(model, allow=ALLOW, every_size=True) as applied:
        fused = step(model, calls)
        modules = [_replaced(model, entry) for entry in applied.report.fused]
        in_use = {} if unfused is None else {"autocast": under_autocast(applied, model, calls, unfused)}
    after = step(model, calls)
    noise = _noise(before, {name for name, _ in model.named_parameters()})
    moved: list[dict[str, Tensor]] = []
    shares: dict[str, float] = {}
    while len(moved) < FEWEST_DRAWS or (len(moved) < MOST_DRAWS and not max(shares.values()) <= 1):
        with one_rounding(dict.fromkeys(modules), draw=len(moved)):
            moved.append(step(model, calls))
        shares = {
            name: _share(fused.get(name), value, [m.get(name) for m in moved], noise.get(name, 0.0))
            for name, value in before.items()
        }
        shares |= {name: float("inf") for name in fused.keys() - before.keys()}
    worst = max(shares, key=shares.__getitem__)
    return applied.report, {
        "tensors": len(before),
        "worst": shares[worst],
        "where": worst,
        "wrong": sorted(name for name, share in shares.items() if not share <= 1),
        "reproducible": (reproducible := _same(before, again)),
        "undo": _same(before, after) if reproducible else None,
    } | in_use


def _is_float32(model: nn.Module) -> bool:
    return any(parameter.dtype is torch.float32 for parameter in model.parameters())


def _replaced(model: nn.Module, entry: Entry) -> nn.Module:
    """The module whose target is replaced: the site or a module below it."""
    below = entry.target.path if entry.target is not None else ""
    return model.get_submodule(".".join(part for part in (entry.paths[0], below) if part))


def _share(found: Tensor | None, true: Tensor, moved: Sequence[Tensor | None], noise: float) -> float:
    if found is None or found.shape != true.shape or found.dtype != true.dtype:
        return float("inf")
    if not torch.equal(found.isfinite(), true.isfinite()):
        return float("inf")
    distance = _distance(found, true)
    if distance == 0:
        return 0.0
    movement = max(float("nan") if each is None else _distance(each, true) for each in moved)
    allowed = ROUNDINGS.get(true.dtype, 16) * torch.finfo(true.dtype).eps * _size(true) + TIMES * movement + noise
    # A result that is zero must stay zero, unless a draw shows that it is zero by chance.
    return distance / allowed if allowed else float("inf")


def _noise(values: Mapping[str, Tensor], parameters: Collection[str]) -> dict[str, float]:
    """For each gradient of a parameter, one rounding of the largest gradient that the same call gives.

    A gradient that is truly zero is the difference of others, which are no more exact than that.
    """
    roundings: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        call, _, own = name.rpartition(": ")
        if own in parameters:
            roundings.setdefault(call, {})[name] = torch.finfo(value.dtype).eps * _size(value)
    return {name: max(of_call.values()) for of_call in roundings.values() for name in of_call}


def _size(tensor: Tensor) -> float:
    return _distance(tensor, torch.zeros_like(tensor))


def _distance(left: Tensor, right: Tensor) -> float:
    wide = (tensor.double().nan_to_num(0.0, 0.0, 0.0) for tensor in (left, right))
    return torch.dist(*wide).item()


def _same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value.nan_to_num(), right[name].nan_to_num()) for name, value in left.items()
    )


def said(error: Exception) -> str:
    """*error* in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
