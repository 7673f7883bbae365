"""The handle on what was changed in a model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from ..errors import PlanError, UndoError
from .counting import Calls, Tried, counted, tried
from .hooked import describe
from .in_use import InUse, NotInUse
from .journal import Change, Patch

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..report import Report


@dataclass
class Application:
    """One call that changed a model: what it planned, what it did, and what watches all that is fused since."""

    report: Report
    patches: Sequence[Patch]
    changes: list[Change]
    in_use: InUse


class Applications(Protocol):
    """What was applied to which model."""

    def are_on(self, model: nn.Module) -> bool:
        """Whether anything was applied to *model*."""

    def undo(self, model: nn.Module) -> None:
        """Take everything off *model*."""

    def undo_one(self, model: nn.Module, application: Application) -> None:
        """Take off *model* what *application* put on."""


class Applied:
    """What is fused in a model, and how to undo it.

    As a context manager, it takes off what *this* call put on when the block ends. A model that was fused before stays
    fused.

    Attributes:
        report: What was fused and what was not, and why.
        patches: Every replacement of the plan, including those that were already in place.
    """

    def __init__(self, applications: Applications, model: nn.Module, application: Application) -> None:
        self.report = application.report
        self.patches = list(application.patches)
        self._applications = applications
        self._application = application
        self._model = weakref.ref(model)  # the handle does not keep the model alive

    @property
    def lost(self) -> list[Patch]:
        """The replacements that are no longer in place, because something else replaced or removed them since."""
        return [patch for patch in self.patches if patch.module_ref() is not None and not patch.in_place()]

    def calls(self) -> list[Calls]:
        """How many calls each kernel computed since it was put on, and how many its original did.

        They belong to the module and the target: every handle of the model gives the same. Counting takes a tenth of a
        microsecond for each call. Calls inside compiled programs are not counted.
        """
        return [each.calls() for each in counted(self.patches)]

    def try_(self, *args: Any, **batch: Any) -> Tried:
        """Call the model and say which kernels the batch reached, and why it did not reach the others.

        Args:
            *args: Passed to the model.
            **batch: Passed to the model.

        Returns:
            The calls of every target. `Tried.not_reached` lists the targets that were not called, and those with calls
            that the original computed, with the reason. Print the result to see them.

        Raises:
            PlanError: If the model is gone.
        """
        if (model := self._model()) is None:
            raise PlanError("the model that was fused is gone: keep a reference to it while you use its handle")
        return tried(self.patches, lambda: model(*args, **batch))

    def check_in_use(self, after: int = 3) -> list[NotInUse]:
        """Warn, once, of kernels that do nothing in the first steps. Call it at the end of each step.

        After ten calls one warning comes without this. It names targets whose calls all went to the original, though
        they were large enough; targets that were not called, though what is beside them was; and targets whose lazy
        results were all computed after all. Each model has one warning, whoever gives it.

        A target is not in use if its replacement was lost, if the original computed all its calls, if it was not
        called, or if all its lazy results were computed after all. Calls inside compiled programs are not counted, so a
        target that was compiled and not called otherwise is taken to be in use.

        What was found goes to ``logging.getLogger("fuseplug")`` on the first rank: a warning with the reasons; of
        targets whose calls were merely too small to gain, a line of level ``INFO``.

        Args:
            after: How many steps to wait for.

        Returns:
            What is not in use on this rank, once *after* steps are over, and the same from then on; empty before, and
            if the model was undone.
        """
        model = self._model()
        in_force = model is not None and self._applications.are_on(model)
        return self._application.in_use.look(after) if in_force else []

    def undo(self) -> None:
        """Take every fused kernel off the model, whichever call put it on. Safe to call twice.

        Raises:
            UndoError: If somebody else has replaced a replacement since. All others have been taken off.
        """
        if (model := self._model()) is not None:
            self._applications.undo(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (model := self._model()) is not None:
            self._applications.undo_one(model, self._application)

    def __repr__(self) -> str:
        return f"<Applied: {len(self.patches)} replacements, {len(self.lost)} lost>"


def complain(left: Sequence[Change]) -> None:
    """Raise `UndoError` if anything was *left*."""
    found = [
        f"{change.path}.{change.method}".lstrip(".") + f" is now {describe(module, change.method)}"
        for change in left
        if (module := change.module_ref()) is not None
    ]
    if found:
        raise UndoError(
            "the rest was undone, but these are no longer Fuseplug's to take off: "
            + "; ".join(found)
            + ". Undo what was put over them (hooks, kernelize, another patch), then call undo() again.",
            left=found,
        )
