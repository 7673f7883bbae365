"""A callback for transformers' Trainer. Importing this module imports transformers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Unpack

from transformers import TrainerCallback

import fuseplug
from fuseplug.applications import ByIdentity

from .heads import Head, serve

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerState, TrainingArguments

    from fuseplug.applications import Applied
    from fuseplug.kernel_manager import AllOptions, KernelManager

__all__ = ["FuseplugCallback"]

_logger = logging.getLogger("fuseplug")


class FuseplugCallback(TrainerCallback):  # type: ignore[misc]  # without types
    """Fuses the model of a Trainer, and warns if kernels do nothing in the first steps of training.

    The model is fused when the Trainer is made, before anything wraps it. A model that ``model_init`` makes anew is
    fused when training begins. The model stays fused for evaluation and generation; saved files are those of the
    unfused model.

    `fuseplug_tools.integrations.heads.serve` serves the heads that a trainer, such as TRL's, put on the model, when
    training begins.

    The first process logs to ``logging.getLogger("fuseplug")``: the first line of the report (level ``INFO``), and a
    warning if nothing was fused, or if `Applied.check_in_use` finds kernels that are not in use.

    Attributes:
        heads: The heads that trainers put on the model, with the calls of each.

    Args:
        steps: After how many steps of training to check whether the kernels are in use.
        undo: Whether to take the kernels off when training ends.
        manager: The manager whose kernels are used; by default ``fuseplug.manager``.
        **options: As `KernelManager.apply_all` takes them.
    """

    def __init__(
        self, *, steps: int = 3, undo: bool = False, manager: KernelManager | None = None, **options: Unpack[AllOptions]
    ) -> None:
        self._steps = steps
        self._undo = undo
        self._manager = manager
        self._options = options
        self._applied: ByIdentity[nn.Module, Applied] = ByIdentity()
        self.heads: list[Head] = []

    def applied_to(self, model: nn.Module) -> Applied | None:
        """The handle on what this callback fused in *model*, even if *model* is wrapped by now; ``None`` if nothing."""
        handles = (self._applied.get(module) for module in model.modules())
        return next((applied for applied in handles if applied is not None), None)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, _control: Any, *, model: nn.Module, **_: Any
    ) -> None:
        """Fuse the model before anything wraps it."""
        self._fuse(model, args, state)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _control: Any, *, model: nn.Module, **_: Any
    ) -> None:
        """Fuse the model if it is a new one, was undone when training ended, or was not on its device before."""
        applied = self.applied_to(model)
        if applied is None or any(entry.check == "pending" for entry in applied.report.fused):
            self._fuse(model, args, state)
        self.heads = serve(model, self._manager or fuseplug.manager, **self._options)

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Check whether the kernels are in use."""
        if (applied := self.applied_to(model)) is not None:
            applied.check_in_use(self._steps)

    def on_train_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Check even if training had fewer than *steps* steps; undo, if that was asked for."""
        applied = self.applied_to(model)
        if applied is None:
            return
        applied.check_in_use(1)
        if self._undo:
            for head in self.heads:
                head.undo()
            applied.undo()
            for module in model.modules():
                self._applied.pop(module)

    def _fuse(self, model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
        manager = self._manager or fuseplug.manager
        applied = self._applied[model] = manager.apply_all(model, **self._placed(model, args))
        if not state.is_world_process_zero:
            return
        report = applied.report
        _logger.info("%s", report.summary())
        if not report.fused:
            reasons = dict.fromkeys(entry.why_not for entry in report.left_alone)
            why = "; ".join(reasons) or "no module of it has the op of an installed kernel (see `fuseplug list`)"
            _logger.warning("nothing is fused in %s: %s", report.model_class, why)

    def _placed(self, model: nn.Module, args: TrainingArguments) -> AllOptions:
        """The options, with the target device if the Trainer leaves it to others to move the model."""
        first = next(model.parameters(), None)
        waits = first is not None and first.device.type in ("cpu", "meta") and args.device.type != "cpu"
        if not waits or "device" in self._options or hasattr(model, "hf_device_map"):
            return self._options
        return {**self._options, "device": args.device}

    def __getstate__(self) -> dict[str, Any]:
        """The state that a search for hyperparameters sends to another process, where no model is fused yet."""
        return {**self.__dict__, "_applied": ByIdentity(), "heads": []}
