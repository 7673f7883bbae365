"""The handle on what was changed in a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import UndoError
from .counting import Calls, Tried, counted, tried
from .hooked import describe
from .in_use import InUse, NotInUse
from .journal import Change, Patch

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..report import Report


class Applied:
    """What is fused in a model, and how to undo it.

    As a context manager, it takes off what *this* call put on when the block ends. A model that was fused before stays
    fused.

    Attributes:
        report: What was fused and what was not, and why.
        patches: Every replacement of the plan, including those that were already in place.
    """

    def __init__(
        self,
        report: Report,
        patches: list[Patch],
        undo_all: Callable[[], None],
        undo_call: Callable[[], None],
        run: Callable[..., Any],
        in_force: Callable[[], bool] = lambda: True,
        in_use: InUse | None = None,
    ) -> None:
        self.report = report
        self.patches = patches
        self._run = run
        self._undo_all = undo_all
        self._undo_call = undo_call
        self._in_force = in_force
        self._in_use = in_use or InUse(patches, lambda: None)

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
        return tried(self.patches, lambda: self._run(*args, **batch))

    def check_in_use(self, after: int = 3) -> list[NotInUse]:
        """Warn, once, of kernels that do nothing in the first steps. Call it at the end of each step.

        What is certain after ten calls is warned of without this: a target whose calls all went to the original, though
        they were large enough; one that was not called, though what is beside it was; and one whose lazy results were
        computed after all. Of a model there is one warning, whoever gives it.

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
        return self._in_use.look(after) if self._in_force() else []

    def undo(self) -> None:
        """Take every fused kernel off the model, whichever call put it on. Safe to call twice.

        Raises:
            UndoError: If somebody else has replaced a replacement since. All others have been taken off.
        """
        self._undo_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo_call()

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
