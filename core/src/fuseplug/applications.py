"""What was applied to which model, and how it is taken back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .by_identity import ByIdentity

if TYPE_CHECKING:
    from torch import nn

    from .patching import Application, Applied, Patch
    from .planning import Plan
    from .report import Report


class Applications:
    """The applications to each model, in their order. No model is kept alive by them."""

    def __init__(self) -> None:
        self._of: ByIdentity[nn.Module, list[Application]] = ByIdentity()

    def apply(self, model: nn.Module, plan: Plan) -> Applied:
        """Put what *plan* has decided on *model*."""
        from .patching import Application, Applied, InUse, put_on

        changes = put_on(plan.patches)
        earlier = self._of.get(model)
        if earlier is None:
            earlier = self._of[model] = []
        in_use = InUse([*_all_patches(earlier, plan.patches)], weakref.ref(model))
        application = Application(replace(plan.report, applied=True), plan.patches, changes, in_use)
        if earlier and not changes:
            # Nothing to take back: it stands in for the one before, or the list would grow with every call.
            last = earlier[-1]
            last.report, last.patches, last.in_use = application.report, application.patches, in_use
        else:
            earlier.append(application)
        return Applied(self, model, application)

    def on(self, model: nn.Module) -> Applied | None:
        """The handle on what is fused in *model* now, whoever fused it; ``None`` if nothing is."""
        from .patching import Application, Applied, InUse, patches_on
        from .walking import everywhere

        places = everywhere(model).values()
        present = [patch for place in places for patch in patches_on(place.module, next(iter(place.paths), ""))]
        if not present:
            return None
        earlier = self._of.get(model)
        if not earlier:
            watching = InUse(present, weakref.ref(model), anew=False)
            earlier = self._of[model] = [Application(_report_of(model, present), present, [], watching)]
        last = earlier[-1]
        return Applied(self, model, Application(last.report, _all_patches(earlier), [], last.in_use))

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

    def undo_one(self, model: nn.Module, application: Application) -> None:
        """Take off *model* what *application* put on, and no more.

        Raises:
            UndoError: As `undo`.
        """
        from .patching import complain, take_off

        applications = self._of.get(model) or []
        if any(known is application for known in applications):
            applications[:] = [known for known in applications if known is not application]
            left = take_off(application.changes)
            if applications:
                applications[-1].in_use.watch()
            complain(left)

    def are_on(self, model: nn.Module) -> bool:
        """Whether there are any to *model*."""
        return bool(self._of.get(model))


def _all_patches(applications: Iterable[Application], more: Iterable[Patch] = ()) -> list[Patch]:
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
