"""What was applied to which model, and how it is taken back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .by_identity import ByIdentity
from .errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from .patching import Applied, Change, InUse, Patch
    from .planning import Plan
    from .report import Report


@dataclass
class _Application:
    """One call that changed a model: what it planned, what it did, and what watches all that is fused since."""

    report: Report
    patches: Sequence[Patch]
    changes: list[Change]
    in_use: InUse


class Applications:
    """The applications to each model, in their order. No model is kept alive by them."""

    def __init__(self) -> None:
        self._of: ByIdentity[nn.Module, list[_Application]] = ByIdentity()

    def apply(self, model: nn.Module, plan: Plan) -> Applied:
        """Put what *plan* has decided on *model*."""
        from .patching import InUse, put_on

        changes = put_on(plan.patches)
        earlier = self._of.get(model)
        if earlier is None:
            earlier = self._of[model] = []
        in_use = InUse([*_all_patches(earlier, plan.patches)], weakref.ref(model))
        application = _Application(replace(plan.report, applied=True), plan.patches, changes, in_use)
        if earlier and not changes:
            # Nothing to take back: it stands in for the one before, or the list would grow with every call.
            last = earlier[-1]
            last.report, last.patches, last.in_use = application.report, application.patches, in_use
        else:
            earlier.append(application)
        return self._handle(model, application)

    def on(self, model: nn.Module) -> Applied | None:
        """The handle on what is fused in *model* now, whoever fused it; ``None`` if nothing is."""
        from .patching import InUse, patches_on
        from .walking import everywhere

        places = everywhere(model).values()
        present = [patch for place in places for patch in patches_on(place.module, next(iter(place.paths), ""))]
        if not present:
            return None
        earlier = self._of.get(model)
        if not earlier:
            watching = InUse(present, weakref.ref(model), anew=False)
            earlier = self._of[model] = [_Application(_report_of(model, present), present, [], watching)]
        last = earlier[-1]
        return self._handle(model, _Application(last.report, _all_patches(earlier), [], last.in_use))

    def undo(self, model: nn.Module) -> None:
        """Take all our replacements off *model*, whichever call put them on.

        Raises:
            UndoError: If somebody else has replaced a replacement since. All others have been taken off.
        """
        from .patching import complain, strip, take_off
        from .walking import everywhere

        applications = self._of.pop(model) or []
        left = take_off([change for application in applications for change in application.changes])
        if left:
            self._of[model] = [replace(applications[-1], changes=left)]
        known = {(id(change.module_ref()), change.method) for change in left}
        for place in everywhere(model).values():
            stripped = strip(place.module, next(iter(place.paths), ""))
            left += [change for change in stripped if (id(place.module), change.method) not in known]
        complain(left)

    def _undo_one(self, model: nn.Module, application: _Application) -> None:
        from .patching import complain, take_off

        applications = self._of.get(model) or []
        if any(known is application for known in applications):
            applications[:] = [known for known in applications if known is not application]
            left = take_off(application.changes)
            if applications:
                applications[-1].in_use.watch()
            complain(left)

    def _handle(self, model: nn.Module, application: _Application) -> Applied:
        from .patching import Applied

        # A weak reference: the handle must not keep the model alive.
        reference = weakref.ref(model)

        def undo_all() -> None:
            if (alive := reference()) is not None:
                self.undo(alive)

        def undo_one() -> None:
            if (alive := reference()) is not None:
                self._undo_one(alive, application)

        def in_force() -> bool:
            return (alive := reference()) is not None and bool(self._of.get(alive))

        def run(*args: Any, **kwargs: Any) -> Any:
            if (alive := reference()) is None:
                raise PlanError("the model that was fused is gone: keep a reference to it while you use its handle")
            return alive(*args, **kwargs)

        patches = list(application.patches)
        return Applied(application.report, patches, undo_all, undo_one, run, in_force, application.in_use)


def _all_patches(applications: Iterable[_Application], more: Iterable[Patch] = ()) -> list[Patch]:
    """The patches of *applications* and *more*, the last of each target."""
    every = [*(patch for application in applications for patch in application.patches), *more]
    return [*{(patch.path, patch.target): patch for patch in every}.values()]


def _report_of(model: nn.Module, patches: Sequence[Patch]) -> Report:
    """The report on a model whose plan is not known, such as a copy of a fused model."""
    from .patching import mark_of
    from .report import Entry, Report

    entries = [
        Entry(
            (patch.path,),
            type(module).__name__,
            mark_of(patch.function).device_type,
            "",
            patch.target,
            patch.kernel_id,
            patch.variant,
        )
        for patch in patches
        if (module := patch.module_ref()) is not None
    ]
    return Report(type(model).__name__, "training", entries, notes=["read off the model: its plan is not at hand"])
