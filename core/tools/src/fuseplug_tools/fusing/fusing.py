"""Fuses the models that a process trains or serves, each once."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fuseplug.errors import PlanError
from fuseplug.report.plain_text import one_line
from fuseplug.report.ranks import rank
from fuseplug_verify import ProcessLock

from ..integrations.heads import serve
from ..run.options import RunOptions
from .beginning import Beginning
from .ranks import Ranks
from .telling import Telling, rows

if TYPE_CHECKING:
    from fuseplug.kernel_manager import KernelManager

log = logging.getLogger("fuseplug.run")

_NONE_TRAINED = 'no model was trained ("--mode inference" fuses models that are only called)'
_NONE_CALLED = "no model in memory was called without gradients, outside of a compiler"
_INSTEAD = (
    "LLaMA-Factory's kernel_config chooses Fuseplug's kernels, and LLaMA-Factory applies none of its own; "
    "it applies them if FUSEPLUG_AUTO is off"
)


class Fusing:
    """Fuses models as the options say. Errors are logged, or raised with ``strict``.

    Args:
        options: The options of ``fuseplug run``.
        manager: The manager that plans and applies.
    """

    def __init__(self, options: RunOptions, manager: KernelManager) -> None:
        self._options = options
        self._manager = manager
        self._watched: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._done: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._chosen: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._beginning = Beginning(self._began, options.mode)
        self._unused: dict[str, None] | None = {}
        """The classes of the models made so far, including parts of other models; ``None`` once a model is in use."""
        self._numbers = itertools.count()
        self._telling = Telling(options)
        self._lock = ProcessLock()

    @property
    def serves(self) -> bool:
        """Whether to fuse models that are called without gradients, instead of models that are trained."""
        return self._options.mode == "inference"

    def watch(self, model: nn.Module) -> None:
        """Fuse *model*, or the model that contains it, at its first call with gradients, unless it is fused by then.

        For inference, fuse it at its first call without gradients.
        """
        self._watched[id(model)] = model
        self._beginning.put_on(model)
        if self._unused is not None:
            self._unused[type(model).__name__] = None

    def choose(self, model: nn.Module, kernels: str | bool | None) -> None:
        """Let a configuration choose the kernels of *model*, unless ``--include`` does.

        Args:
            model: The model that will be fused, a part of it, or a module that contains it.
            kernels: Ids or ops, separated by commas. ``"auto"``, or no string, leaves the choice as it is.
        """
        if isinstance(kernels, str) and kernels != "auto":
            self._chosen[model] = tuple(filter(None, map(str.strip, kernels.split(","))))
        if rank() == 0:
            log.info(_INSTEAD)

    def outermost(self, model: nn.Module) -> nn.Module:
        """The largest watched model that contains *model*; *model* itself if there is none."""
        watched = list(self._watched.values())
        return max(
            (candidate for candidate in watched if _has(candidate, model)),
            key=lambda one: len([*one.modules()]),
            default=model,
        )

    def fuse_watched(self, model: nn.Module) -> None:
        """Fuse the largest watched model that contains *model*, or else *model* if it contains a watched one."""
        model = self.outermost(model)
        if any(id(module) in self._watched for module in model.modules()):
            self.fuse(model)

    def fuse(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        """Fuse *model*, unless somebody fused it before, or only trained models are fused and all of it is frozen.

        Args:
            model: The model.
            device: Where the model will be moved, if it is in the memory of the host or on meta.

        Raises:
            FuseplugError: With ``strict``, if it cannot be fused as planned.
        """
        with self._lock:
            if not self.serves and not any(parameter.requires_grad for parameter in model.parameters()):
                return
            if any(_has(fused, model) for fused in list(self._done.values())):
                return
            self._done[id(model)] = model
            self._unused = None
            self._beginning.take_off(model)
            if self._manager.applied_to(model) is not None:
                return  # the user's own code fused it, and knows better what it wants
            try:
                self._plan_and_apply(model, _destination(model, device))
            except Exception as error:
                if self._options.strict:
                    raise
                why = f"{type(error).__name__}: {one_line(error)}"
                what = "used" if self.serves else "trained"
                log.warning(f"{type(model).__name__} is {what} unfused on rank {rank()}, because of this: {why}")

    def ended(self) -> None:
        """Report the calls when the process ends, or say that no model was in use although some were made.

        A worker process does not say this, because it is normal there.
        """
        self._telling.ended()
        if self._unused and rank() == 0 and multiprocessing.parent_process() is None:
            why = _NONE_CALLED if self.serves else _NONE_TRAINED
            log.info("nothing was fused: %s; models that were made: %s", why, ", ".join(self._unused))

    def _began(self, model: nn.Module) -> None:
        model = self.outermost(model)
        # A model on meta is not in use yet: somebody may only count its operations, for example.
        if not any(parameter.is_meta for parameter in model.parameters()):
            self.fuse(model)

    def _plan_and_apply(self, model: nn.Module, device: torch.device | str | None) -> None:
        ranks = Ranks.now(next(self._numbers))
        try:
            with ranks.compiling_first():
                plan = self._manager.plan(model, device=device, **self._for_plan(model))
        except Exception as error:
            ranks.refuse(f"rank {rank()} has no plan: {type(error).__name__}: {error}")
            raise
        difference = ranks.difference(rows(plan.report))
        if difference:
            raise PlanError(f"the ranks have different plans, so no rank changes anything: {difference}", plan=plan)
        applied = None if self._options.dry_run else self._manager.apply_plan(model, plan)
        heads = [] if applied is None else serve(model, self._manager, device=device, **self._for_plan(model))
        self._telling.planned(model, plan.report, applied, heads)

    def _for_plan(self, model: nn.Module) -> dict[str, Any]:
        chosen = (names for chosen, names in self._chosen.items() if _has(chosen, model) or _has(model, chosen))
        options = self._options.for_plan()
        return options | {"include": options["include"] or next(chosen, None)}


def _destination(model: nn.Module, device: torch.device | str | None) -> torch.device | str | None:
    """*device*, if *model* has yet to be moved there; otherwise ``None``."""
    types = {parameter.device.type for parameter in model.parameters()}
    return device if types <= {"cpu", "meta"} and device is not None and types != {torch.device(device).type} else None


def _has(model: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in model.modules())
