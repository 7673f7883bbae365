"""Rank 0's messages about fused models: a log line for each distinct model, and the file of the reports."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fuseplug.patching.counting import Counted, counted
from fuseplug.report.plain_text import one_line
from fuseplug.report.ranks import rank

from ..run import reports
from ..run.options import RunOptions

if TYPE_CHECKING:
    from torch import nn

    from fuseplug.applications import Applied
    from fuseplug.report import Report

    from ..integrations.heads import Head

log = logging.getLogger("fuseplug.run")

_LEAVES = (
    "DeepSpeed's ZeRO-3 hooks the parts of %s, so the originals compute these; kernels do if ZeRO-3 gathers each as a "
    "whole: set ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES=%s, or call deepspeed.utils.set_z3_leaf_modules(model, [%s])"
)


@dataclass
class _Told:
    """A distinct model: the number of its report, the process that wrote it, and the targets of all models like it."""

    number: int | None = None
    process: int = field(default_factory=os.getpid)
    targets: list[Counted | Head] = field(default_factory=list)


class Telling:
    """Logs and reports what is fused.

    Args:
        options: The options of ``fuseplug run``.
    """

    def __init__(self, options: RunOptions) -> None:
        self._dry = options.dry_run
        self._path = None if options.report is None else Path(options.report)
        self._told: dict[Any, _Told] = {}

    def planned(self, model: nn.Module, report: Report, applied: Applied | None, heads: Sequence[Head] = ()) -> None:
        """Log and report the plan for a model, unless there was a model like it before.

        Args:
            model: The model.
            report: The report of the plan.
            applied: The handle on what was changed; ``None`` if nothing was.
            heads: The heads that trainers put on the model.
        """
        if rank() != 0:
            return
        report = report if applied is None else applied.report
        what = (report.model_class, *rows(report))
        if what not in self._told:
            told = self._told[what] = _Told()
            line = one_line("; note: ".join([report.summary(), *report.notes]))
            log.info("%s%s", "dry run, nothing is changed: " if self._dry else "", line)
            if (classes := _hooked_by_zero3(model, report)) and _zero3_is_on():
                log.info(_LEAVES, " and ".join(classes), ",".join(classes), ", ".join(classes))
            if self._path is not None:
                told.number = reports.add(self._path, {"calls": None, **report.to_dict()})
        if applied is not None:
            self._told[what].targets += [*counted(applied.patches), *heads]

    def ended(self) -> None:
        """Write the calls into the reports of this process, and log how many targets had only calls too small to gain.

        A fork of the process does neither.
        """
        for told in self._told.values():
            if told.process != os.getpid():
                continue
            counts, number = [target.counter for target in told.targets], len(told.targets)
            # Targets whose calls all went to the original, for no reason but their size.
            if small := sum(bool(c.original) and not c.fused and not c.reasons for c in counts):
                log.info("%d of %d fused targets had no call large enough to gain", small, number)
            if self._path is not None and told.number is not None:
                try:
                    reports.complete(self._path, told.number, calls=_added(told.targets))
                except OSError as error:
                    log.warning("--report %s: the calls cannot be written: %s", self._path, error.strerror)


def _zero3_is_on() -> bool:
    """Whether transformers, or accelerate, will hand models to DeepSpeed's ZeRO-3."""
    integration = sys.modules.get("transformers.integrations.deepspeed")
    return integration is not None and bool(integration.is_deepspeed_zero3_enabled())


def _hooked_by_zero3(model: nn.Module, report: Report) -> list[str]:
    """The classes of the modules that a kernel computes without calling their children."""
    whole = (model.get_submodule(entry.paths[0]) for entry in report.fused if str(entry.target) == "forward")
    return sorted({type(module).__name__ for module in whole if next(module.children(), None) is not None})


def rows(report: Report) -> Sequence[str]:
    """A row for each fused target. All ranks must have the same rows."""
    return [f"{e.paths[0] or '(the model)'} {e.target}: {e.kernel_id}, {e.variant}" for e in report.fused]


def _added(targets: Sequence[Counted | Head]) -> list[dict[str, Any]]:
    """The calls of models that are alike, added up by target, as plain data."""
    by_target: dict[str, dict[str, Any]] = {}
    for calls in (target.calls() for target in targets):
        where = {"paths": list(calls.paths), "target": str(calls.target), "kernel": calls.kernel_id}
        row = by_target.setdefault(str(where), {**where, "fused": 0, "original": 0})
        row["fused"] += calls.fused
        row["original"] += calls.original
    return [*by_target.values()]
