"""The targets of a plan by kind, the runs of the model that record how each kind is called, and the measured times."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug.contract import Rejection
from fuseplug.disk_cache import NOWHERE, DiskCache, folder
from fuseplug.errors import PlanError
from fuseplug.patching import replacement_of
from fuseplug.patching.gains import Gains
from fuseplug.planning.progress import showing
from fuseplug_verify import neutral, said_by

from .batches import GIVE, Batch, Runs, refuse_absent, runs_of
from .calls import RecordedCall, recorded
from .figures import Figure, measured
from .timing import Keeping, at_most, described, figure, own_tensors_of

if TYPE_CHECKING:
    from fuseplug.patching import Patch


@dataclass
class Kind:
    """Targets that take equally long: they have one replacement, and their modules' parameters have the same shapes.

    Attributes:
        key: As `Keeping.key`.
        patches: The replacements, by path and target.
        recorded: Whether the model was run to record the calls of these targets.
        figures: The measured times, one figure for each different call.
        fault: Why the kernel cannot be timed, if it or its original raises.
        note: Why there is no figure, if nothing is wrong.
    """

    key: Callable[[], str]
    patches: dict[str, Patch] = field(default_factory=dict)
    recorded: bool = False
    figures: list[Figure] = field(default_factory=list)
    fault: Rejection | None = None
    note: str = ""

    @property
    def first(self) -> Patch:
        """One of the replacements."""
        return next(iter(self.patches.values()))

    def gains(self, declared: Gains) -> Gains | Rejection:
        """The sizes at which the kernel is used: *declared*, unless they were measured; or why it is not used."""
        if self.fault is not None:
            return self.fault
        if (gains := measured(declared, self.figures)) is not None:
            return gains
        figures = "; ".join(map(str, self.figures))
        return Rejection(f"it was measured, and gains in no call that the model made: {figures}", kind="slower")

    def __str__(self) -> str:
        more = f" and {len(self.patches) - 1} more" if len(self.patches) > 1 else ""
        return f"{next(iter(self.patches))}{more}"


class Task(NamedTuple):
    """A call to time.

    Attributes:
        kind: The kind of the target.
        call: The recorded call.
        main: The main input among the arguments.
    """

    kind: Kind
    call: RecordedCall
    main: Tensor


def measurer(model: nn.Module, measure: object, *, device_type: str | None, gradients: bool, anew: bool) -> Kinds:
    """Make the measurer that `fuseplug.planning.measurer.measurer_of` returns.

    Raises:
        PlanError: If *measure* is no batch of the model, or the model cannot be run on *device_type*.
    """
    refuse_absent(model, device_type)
    kept = NOWHERE if anew else DiskCache("timings", folder())
    return Kinds(model, runs_of(model, measure), gradients=gradients, kept=kept)


class Kinds:
    """The kinds that are measured while one plan is made: a `fuseplug.planning.measurer.Measurer`.

    Args:
        model: The model.
        runs: How the model is run.
        gradients: Whether the model is run with gradients, and the backward is timed, too.
        kept: The cache where times are looked up, and kept for other processes.
    """

    def __init__(self, model: nn.Module, runs: Runs, *, gradients: bool, kept: DiskCache) -> None:
        self._model = model
        self._runs = runs
        self._gradients = gradients
        self._kept = kept
        self._kinds: dict[Hashable, Kind] = {}

    def of(self, patch: Patch, module: nn.Module, key: Callable[[], str]) -> Kind:
        """The kind of *patch*.

        Args:
            patch: A replacement that is not in place.
            module: The module whose target it replaces.
            key: As `Keeping.key`.
        """
        kind = self._kinds.setdefault((patch.function, own_tensors_of(module)), Kind(functools.cache(key)))
        kind.patches.setdefault(f"{patch.path or 'the model'}.{patch.target}", patch)
        return kind

    def measure(self) -> bool:
        """Run the model for the kinds that are new and time them; return whether there were any.

        Raises:
            PlanError: If the model cannot be copied, or raises.
        """
        tasks = self.record()
        if tasks is None:
            return False
        doing = f"timing {len(tasks)} calls, about {max(1, round(self.seconds(tasks)))} s at most, compilers aside:"
        with showing(tasks, doing, lambda task: str(task.kind)) as shown:
            for task in shown:
                self.time(task)
        return True

    def record(self) -> list[Task] | None:
        """Run the model for the kinds that are new; return the calls to time, or ``None`` if no kind is new.

        Raises:
            PlanError: If the model cannot be copied, or raises.
        """
        new = {key: kind for key, kind in self._kinds.items() if not kind.recorded}
        if not new:
            return None
        calls: dict[Hashable, dict[str, RecordedCall]] = {key: {} for key in new}
        for number, batch in enumerate(self._runs.batches):
            for key, call in self._run(new, batch, number).items():
                calls[key].setdefault(described(call), call)
        with self._surroundings():
            return [task for key, kind in new.items() for task in _tasks(kind, [*calls[key].values()])]

    def seconds(self, tasks: Sequence[Task]) -> float:
        """About how many seconds it takes to time *tasks* at most, compilers aside."""
        # A backward takes twice as long as its forward.
        works = (1, 3) if self._gradients else (1,)
        return sum(at_most(work * task.call.seconds) for task in tasks for work in works)

    def time(self, task: Task) -> None:
        """Time *task*, and add the figure, or the fault, to its kind."""
        kind = task.kind
        if kind.fault is not None:
            return
        keeping = Keeping(self._kept, kind.key)
        try:
            with self._runs.entered():
                measured_call = figure(kind.first, task.call, task.main, keeping, gradients=self._gradients)
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything at a size at which nobody ran it
            shape = " × ".join(map(str, task.main.shape))
            kind.fault = Rejection(f"{said_by(error)} while it and the original were timed with {shape}", kind="error")
            return
        kind.figures = sorted([*kind.figures, measured_call], key=lambda figure: figure.elements)

    def notes(self) -> list[str]:
        """What a user should know about kinds without a figure."""
        return [
            f"not measured: {kind}, because {kind.note}; {kind.first.kernel_id} is used from the size that it declares"
            for kind in self._kinds.values()
            if kind.note and not kind.figures
        ]

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The context in which the model runs, and in which guards are asked about its calls."""
        with torch.set_grad_enabled(self._gradients), self._runs.entered():
            yield

    def _run(self, kinds: Mapping[Hashable, Kind], batch: Batch, number: int) -> dict[Hashable, RecordedCall]:
        alike = {key: [*kind.patches.values()] for key, kind in kinds.items()}

        def run(model: nn.Module) -> None:
            with self._surroundings():
                model(**batch)

        device_types = (parameter.device.type for parameter in self._model.parameters())
        device_type = next((kind for kind in device_types if kind != "cpu"), "cpu")
        with neutral(device_type, dtype=None, random_kept=True):
            try:
                return recorded(self._model, alike, run)
            except Exception as error:
                which = f"batch {number + 1} of {len(self._runs.batches)} ({', '.join(map(str, batch))})"
                raise PlanError(
                    f"measure= runs a copy of {type(self._model).__name__}, which fails with {which}: "
                    f"{said_by(error)}; {GIVE}, or drop measure="
                ) from error


def _tasks(kind: Kind, calls: Sequence[RecordedCall]) -> list[Task]:
    """The tasks of *kind*: those of *calls* that reach the kernel."""
    kind.recorded = True
    kind.note = "" if calls else "no batch leads to a call of it"
    tasks = []
    for call in calls:
        replacement = replacement_of(kind.first.function)
        main = replacement.main_input(call.args, call.kwargs)
        if main is None:
            kind.note = f"its calls are the original's anyway: {replacement.why_not(call.args, call.kwargs)}"
        else:
            tasks.append(Task(kind, call, main))
    return tasks
