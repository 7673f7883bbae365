"""Records what was applied to which model, gives the handle on it, and undoes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import nn

from .errors import PlanError, UndoError
from .model_tree.places import everywhere
from .patching import Change, InUse, Patch, describe, mark_of, patches_on, put_on, strip, take_off
from .patching.counting import Calls, Trial, counted, tried
from .patching.in_use import NotInUse
from .planning import Plan
from .report import Entry, Report

if TYPE_CHECKING:
    from typing import Self

K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(Generic[K, V]):
    """Values for objects, for as long as the objects live.

    A module may define ``__eq__`` or have no ``__hash__``, and ``WeakKeyDictionary`` would take two equal modules for
    one. If the mapping itself goes, as with a manager that nobody holds, the values stay until the garbage collector
    runs. In torch's ``WeakIdKeyDictionary`` they would go at once, and with them the warning of kernels not in use.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[K], V]] = {}

    def __setitem__(self, key: K, value: V) -> None:
        items, number = self._items, id(key)

        def forget(reference: weakref.ref[K]) -> None:
            # By now, the number may belong to a new object.
            if number in items and items[number][0] is reference:
                del items[number]

        items[number] = (weakref.ref(key, forget), value)

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        """The value of *key*; ``None`` if there is none."""
        reference, value = self._items.get(id(key), (None, None))
        return value if reference is not None and reference() is key else None

    def pop(self, key: K) -> V | None:
        """Remove *key* and return its value; ``None`` if there is none."""
        value = self.get(key)
        self._items.pop(id(key), None)
        return value


@dataclass
class Application:
    """One call that changed a model: its plan, its changes, and the watch on everything that is fused since."""

    report: Report
    patches: Sequence[Patch]
    changes: list[Change]
    in_use: InUse


class Applications:
    """The applications to each model, in order. They do not keep the model alive."""

    def __init__(self) -> None:
        self._of: ByIdentity[nn.Module, list[Application]] = ByIdentity()

    def apply(self, model: nn.Module, plan: Plan) -> Applied:
        """Apply *plan* to *model*."""
        changes = put_on(plan.patches)
        earlier = self._of.get(model)
        if earlier is None:
            earlier = self._of[model] = []
        in_use = InUse([*_all_patches(earlier, plan.patches)], weakref.ref(model))
        application = Application(replace(plan.report, applied=True), plan.patches, changes, in_use)
        if earlier and not changes:
            # There is nothing to undo: update the last application, or the list would grow with every call.
            last = earlier[-1]
            last.report, last.patches, last.in_use = application.report, application.patches, in_use
        else:
            earlier.append(application)
        return Applied(self, model, application)

    def on(self, model: nn.Module) -> Applied | None:
        """The handle on what is fused in *model* now, whoever fused it; ``None`` if nothing is."""
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
        applications = self._of.pop(model) or []
        left = take_off([change for application in applications for change in application.changes])
        if left:
            self._of[model] = [replace(applications[-1], changes=left)]
        complained = {(id(change.module_ref()), change.method) for change in left}
        for place in everywhere(model).values():
            stripped = strip(place.module, next(iter(place.paths), ""))
            left += [change for change in stripped if (id(place.module), change.method) not in complained]
        _complain(left)

    def undo_one(self, model: nn.Module, application: Application) -> None:
        """Take off *model* only what *application* put on.

        Raises:
            UndoError: As `undo`.
        """
        applications = self._of.get(model) or []
        if any(other is application for other in applications):
            applications[:] = [other for other in applications if other is not application]
            left = take_off(application.changes)
            if applications:
                applications[-1].in_use.watch()
            _complain(left)

    def are_on(self, model: nn.Module) -> bool:
        """Whether there are any applications to *model*."""
        return bool(self._of.get(model))


class Applied:
    """What is fused in a model, and how to undo it.

    As a context manager, it takes off what *this* call put on when the block ends. Replacements from before stay.

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
        """The numbers of calls that each kernel and its original computed since the kernel was put on.

        The counts belong to the replacement of a target, so every handle with this replacement gives the same counts. A
        later `KernelManager.apply_all` that makes a new replacement, as after a cast, counts anew: use its handle, or
        that of `KernelManager.applied_to`. Counting takes a tenth of a microsecond for each call. Calls inside compiled
        programs are not counted.
        """
        return [target.calls() for target in counted(self.patches)]

    def try_(self, *args: Any, **batch: Any) -> Trial:
        """Call the model and say which kernels the batch reached, and why it did not reach the others.

        Args:
            *args: Passed to the model.
            **batch: Passed to the model.

        Returns:
            The calls of every target. `Trial.not_reached` lists the targets that were not called, and those with calls
            that the original computed, with the reason. Print the result to see them.

        Raises:
            PlanError: If the model is gone.
        """
        if (model := self._model()) is None:
            raise PlanError("the model that was fused is gone: keep a reference to it while you use its handle")
        return tried(self.patches, lambda: model(*args, **batch))

    def check_in_use(self, after: int = 3) -> list[NotInUse]:
        """Warn, once, of kernels that do nothing in the first steps. Call it at the end of each step.

        Without this method, Fuseplug warns after ten calls. That warning names targets whose calls all went to the
        original, although they were large enough; targets that were not called, although targets beside them were; and
        targets whose lazy results were all computed after all. Each model gets one warning in all.

        A target is not in use if its replacement was lost, if the original computed all its calls, if it was not
        called, or if all its lazy results were computed after all. Calls inside compiled programs are not counted, so a
        target that was compiled and not called otherwise is taken to be in use.

        On the first rank, the findings go to ``logging.getLogger("fuseplug")``: a warning with the reasons, and a line
        of level ``INFO`` about targets whose calls were merely too small to gain.

        Args:
            after: How many steps to wait for.

        Returns:
            The targets that are not in use on this rank, judged after *after* steps, and the same list from then on.
            Empty before that, and after `undo`.
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


def _all_patches(applications: Iterable[Application], more: Iterable[Patch] = ()) -> list[Patch]:
    """The patches of *applications* and *more*; for each target, the last one."""
    every = [*(patch for application in applications for patch in application.patches), *more]
    return [*{(patch.path, patch.target): patch for patch in every}.values()]


def _report_of(model: nn.Module, patches: Sequence[Patch]) -> Report:
    """The report on a model whose plan is not known, such as a copy of a fused model."""
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
    return Report(
        type(model).__name__, "training", entries, notes=["read off the model, because its plan is not available"]
    )


def _complain(left: Sequence[Change]) -> None:
    """Raise `UndoError` if anything was *left*."""
    replaced = [
        f"{change.path}.{change.method}".lstrip(".") + f" is now {describe(module, change.method)}"
        for change in left
        if (module := change.module_ref()) is not None
    ]
    if replaced:
        raise UndoError(
            "the rest was undone, but these are no longer Fuseplug's to take off: "
            + "; ".join(replaced)
            + ". Undo what was put over them (hooks, kernelize, another patch), then call undo() again.",
            left=replaced,
        )
