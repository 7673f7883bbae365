"""The manager: it knows the installed kernels, and plans, applies and undoes them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack

import pluggy

from .configuration import SETTINGS, environment, named
from .contract import Mode
from .discovery import discover, elsewhere, load_class
from .discovery.ownership import REGISTERED
from .discovery.plugins import plugged_in
from .discovery.records import KernelRecord
from .discovery.selecting import named_by, names_in, select
from .errors import DiscoveryError, PlanError
from .hookspecs import PROJECT, BaseKernel

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .applications import Applications, Applied
    from .devices import Destination
    from .planning import Plan

K = TypeVar("K", bound=type[BaseKernel])
Rounding: TypeAlias = Literal["close", "exact"]
Measure: TypeAlias = bool | Mapping[str, Any] | Sequence[Mapping[str, Any]]
EVERY_SIZE_VARIABLE = SETTINGS["every_size"].variable
Find = Callable[[Mapping[str, str], Iterable[KernelRecord]], list[KernelRecord]]


class Options(TypedDict, total=False):
    """The keyword arguments of `KernelManager.apply`. `KernelManager` explains them."""

    exclude: Sequence[str] | str
    only: Sequence[str] | str
    skip: Sequence[str] | str
    device: torch.device | str | None
    mode: Literal["auto", "training", "inference"]
    verify: bool | Literal["always"]
    strict: bool
    allow: Sequence[str] | str
    every_size: bool
    measure: Measure
    rounding: Rounding


class AllOptions(Options, total=False):
    """The keyword arguments of `KernelManager.apply_all`."""

    include: Sequence[str] | str | None


class KernelManager:
    """Manages the installed kernels, and records what was applied to which model.

    The keyword arguments that `plan`, `apply_all` and `apply` share:

    * ``include``: kernel ids or ops. Only these take part, and earlier ones are preferred. ``None``: all take part.
    * ``exclude``: kernel ids or ops that do not take part.
    * ``only``, ``skip``: globs of module paths (``"model.layers.*.mlp"``). A glob stands for the modules that it
      matches and all modules below them.
    * ``device``: where the model will run, if it is not there now.
    * ``mode``: ``"training"``, ``"inference"``, or ``"auto"``, which means training, because gradients are assumed to
      be needed. For inference, nothing with gradients is compiled or checked, and the original computes calls with
      gradients.
    * ``verify``: ``False`` does not run each kernel on its device. Fuseplug always finds out what a module computes, by
      running a twin of it. A check that a kernel passed is kept for other processes until something that it depends on
      changes; ``"always"`` runs it again.
    * ``strict``: raise an error if a kernel that fits a site could not be used there. These are no errors: a site that
      computes something else, a consent that you did not give, and a kernel that is slower or rounds otherwise.
    * ``allow``: words for what you agree to give up. A kernel that changes more than speed and memory names a word
      (``"lazy_logits"``), and is used only if ``allow`` has this word. The report says which kernel asks for which
      word.
    * ``every_size``: use kernels in calls of every size. By default, the original computes calls that are too small to
      gain, as each kernel declares (`BaseKernel.gains_from`). ``FUSEPLUG_EVERY_SIZE=1`` has the same effect.
    * ``measure``: find out by timing from which size on each kernel gains in this model, on this machine, instead of
      believing the size that it declares. A kernel that gains in no call is not used. Give one batch, or a sequence of
      several, as keyword arguments of the model, in the sizes that you will use; or ``True`` for one row of 16, 128,
      512 and 2048 random tokens. Fuseplug runs the model's forward once for each batch, in training or eval mode as you
      left it, under autocast if that is on, and without gradients for inference. It runs a copy that shares the
      parameters, so buffers, gradients and the state of random generators stay as they are, but other side effects of
      the model's code do happen. Times are kept for other processes, as passed checks are.
    * ``rounding``: ``"exact"`` uses only kernels whose results, and for training also their gradients, are the
      original's bit for bit, at all sizes that are tried on this device. The report says how many targets this leaves
      alone. ``"close"``, the default, allows the roundings that each op states.

    Args:
        environ: The variables, of which ``FUSEPLUG_KERNELS`` and ``FUSEPLUG_ALLOW`` are read; ``None`` for the
            environment, and the nearest ``fuseplug.toml`` or ``[tool.fuseplug]`` of a ``pyproject.toml`` in or above
            the working directory.
        find: Finds the kernels, given *environ* and the records of registered kernels; ``None`` finds installed ones.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, find: Find | None = None) -> None:
        self._environ = environ
        self._find = find
        self._records: list[KernelRecord] | None = None
        self._plugins = pluggy.PluginManager(PROJECT)
        self._registered: dict[str, KernelRecord] = {}

    def kernels(self) -> list[KernelRecord]:
        """Every kernel that is installed or registered, whatever its state, in the order of distribution and id."""
        if self._records is None:
            self.refresh()
        return list(self._records or ())

    def refresh(self) -> None:
        """Look again at what is installed, after a ``pip install`` in a running process."""
        if self._records is not None:
            importlib.invalidate_caches()
        environ = environment() if self._environ is None else self._environ
        records = (self._find or discover)(environ, self._registered.values())
        self._records, self._plugins = plugged_in(records)

    def register(self, kernel: K) -> K:
        """Add a kernel class that is not packaged. Usable as a decorator. A second class with an id replaces the first.

        Raises:
            DiscoveryError: If *kernel* is not a valid kernel, or an installed kernel has its id.
        """
        name = getattr(kernel, "__qualname__", repr(kernel))
        kernel_id = str(getattr(kernel, "kernel_id", name))
        value = f"{getattr(kernel, '__module__', '')}:{name}".lstrip(":")
        record = load_class(kernel, KernelRecord(kernel_id, REGISTERED, value=value))
        if record.state != "ready":
            raise DiscoveryError(f"cannot register {record.value}: {record.reason}", record=record)
        # A record that yielded to an earlier registration yields to this one, too.
        given_way = ("off", "conflict") if record.kernel_id in self._registered else ("off",)
        for other in self.kernels():
            if (
                other.kernel_id == record.kernel_id
                and other.distribution not in (REGISTERED, "")
                and other.state not in given_way
            ):
                raise DiscoveryError(
                    f"cannot register {record.value}: {other.distribution} already has a kernel {record.kernel_id!r}; "
                    "give yours another kernel_id",
                    record=record,
                )
        self._registered[record.kernel_id] = record
        self.refresh()
        return kernel

    def plan(
        self,
        model: nn.Module,
        *,
        include: Sequence[str] | str | None = None,
        exclude: Sequence[str] | str = (),
        only: Sequence[str] | str = (),
        skip: Sequence[str] | str = (),
        device: torch.device | str | None = None,
        mode: Literal["auto", "training", "inference"] = "auto",
        verify: bool | Literal["always"] = True,
        strict: bool = False,
        allow: Sequence[str] | str = (),
        every_size: bool = False,
        measure: Measure = False,
        rounding: Rounding = "close",
    ) -> Plan:
        """Decide and check what would be done to *model*, and change nothing. `KernelManager` explains the arguments.

        Raises:
            PlanError: If *model* is not a module, a glob matches nothing, *device*, *mode*, *rounding* or *verify* is
                unknown, names are no strings, *rounding* is ``"exact"`` without *verify*, or *measure* is no batch of
                the model, or is given with *every_size*, for a model that cannot be run here, or without
                fuseplug-tools.
            DiscoveryError: If a kernel that was asked for by name is not installed or not ready.
            SettingsError: If the user's file with settings is not valid.
            RejectedError: With ``strict``, if something had to be left alone; `VerificationError` if the reason is that
                a kernel's numbers are wrong.
        """
        from fuseplug_verify import neutral

        from .model_tree.places import walk
        from .planning import Rules, make_plan
        from .planning.measurer import measurer_of
        from .planning.proposing import Questioner
        from .planning.refusing import refuse_left_alone

        _must_be_module(model)
        purpose, exact = _mode(mode), _exact(rounding, verify)
        destination, records, plugins = self._destination(device)
        excluded = [
            record.name for word in names_in(exclude) for record in named_by(records, word, must_be_ready=False)
        ]
        taking_part = select(records, include, excluded, purpose)
        every = every_size or environment().get(EVERY_SIZE_VARIABLE, "").lower() not in ("", "0", "off", "false", "no")
        measurer = None
        if measure is not False:
            _refuse_every_size(every)
            kind = None if destination is None else destination.type
            training, anew = purpose == "training", verify == "always"
            measurer = measurer_of(model, measure, device_type=kind, gradients=training, anew=anew)
        rules = Rules(
            *(taking_part, names_in(include or ()), purpose, verify, records, names_in(allow)),
            every_size=every,
            measurer=measurer,
            exact=exact,
            excluded=excluded,
        )
        with neutral(dtype=None):
            places = walk(model, only=names_in(only), skip=names_in(skip), device=destination)
            plan = make_plan(model, places, rules, Questioner(plugins).ask)
        if strict:
            refuse_left_alone(plan.report)
        return plan

    def apply_all(self, model: nn.Module, **options: Unpack[AllOptions]) -> Applied:
        """Fuse everything in *model* that an installed kernel fits: plan, verify, apply, report.

        A second call keeps what is in place, and puts back replacements that were lost since.

        Args:
            model: Any module. Its instances are changed in place.
            **options: As in `plan`.

        Returns:
            A handle with the report and `undo`.

        Raises:
            PlanError, DiscoveryError, RejectedError: As in `plan`. A faulty installed kernel is no error: the report
                names it.
        """
        return self._applications.apply(model, self.plan(model, **options))

    def apply_plan(self, model: nn.Module, plan: Plan) -> Applied:
        """Apply *plan* to *model*, all or nothing.

        Args:
            model: The model that was given to `plan`.
            plan: What `plan` returned.

        Raises:
            PlanError: If *plan* is of another model.
        """
        _must_be_module(model)
        from .model_tree.places import everywhere

        present = {id(place.module) for place in everywhere(model).values()}
        for patch in plan.patches:
            if id(patch.module_ref()) not in present:
                raise PlanError(
                    f"the plan was made for another model: this one has no {patch.path}.{patch.target}; plan this model"
                )
        return self._applications.apply(model, plan)

    def apply(self, kernel_ids: str | Sequence[str], model: nn.Module, **options: Unpack[Options]) -> Applied:
        """Fuse with these kernels, earlier ones preferred. Each must be ready and fit at least one site.

        Args:
            kernel_ids: One kernel id or op, or several.
            model: As in `apply_all`.
            **options: As in `plan`, without ``include``.

        Raises:
            DiscoveryError: If a kernel is not installed or not ready.
            RejectedError: If a kernel, or every kernel of an op, fits no site of this model; `VerificationError` if the
                reason is that its numbers are wrong.
        """
        _must_be_module(model, "apply takes the kernels first, then the model")
        from .planning.refusing import refuse_unused

        names = names_in(kernel_ids)
        plan = self.plan(model, include=names, **options)
        refuse_unused(plan.report, {name: named_by(plan.report.records, name) for name in names})
        return self._applications.apply(model, plan)

    def applied_to(self, model: nn.Module) -> Applied | None:
        """The handle on what is fused in *model* now, also in a copy of a fused model; ``None`` if nothing is."""
        _must_be_module(model)
        return self._applications.on(model)

    def undo(self, model: nn.Module) -> None:
        """Take all our replacements off *model*, whichever call put them on.

        Raises:
            UndoError: If somebody else has replaced a replacement since. All others have been taken off.
        """
        _must_be_module(model)
        self._applications.undo(model)

    @functools.cached_property
    def _applications(self) -> Applications:
        from .applications import Applications  # imports torch, which a list of kernels does not need

        return Applications()

    def _destination(
        self, device: torch.device | str | None
    ) -> tuple[Destination | None, list[KernelRecord], pluggy.PluginManager]:
        """Where the model will run, and the kernels for that machine, which may have what this one lacks."""
        records, plugins = self.kernels(), self._plugins
        if device is None:
            return None, records, plugins
        from .devices import KNOWN, destination

        possible = [elsewhere(record) for record in records]
        claimed = {kind for record in possible if record.kernel for kind in record.kernel.device_types}
        place = destination(device, KNOWN | claimed)
        if place.device is not None or possible == records:
            return place, records, plugins
        return place, *plugged_in(possible)


def _refuse_every_size(every_size: bool) -> None:
    if every_size:
        raise PlanError(
            "measure= finds the size from which on a kernel is used, and every_size=True, or "
            f"{named(environment(), EVERY_SIZE_VARIABLE)}, uses it at every size: drop one of them"
        )


def _must_be_module(model: object, hint: str = "load or build the model first") -> None:
    from torch import nn

    if isinstance(model, nn.Module):
        return
    what = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} {str(model)[:60]!r}"
    hint = "pass its .model" if isinstance(getattr(model, "model", None), nn.Module) else hint
    raise PlanError(f"expected a torch.nn.Module, found {what}: {hint}", found=model)


def _must_be_known(name: str, value: object, known: Sequence[object], expected: str) -> None:
    if value not in known:
        raise PlanError(f"{name}={value!r} is unknown: expected {expected}")


def _mode(mode: str) -> Mode:
    _must_be_known("mode", mode, ("auto", "training", "inference"), '"auto", "training" or "inference"')
    return "inference" if mode == "inference" else "training"


def _exact(rounding: str, verify: bool | str) -> bool:
    _must_be_known("rounding", rounding, ("close", "exact"), '"close" or "exact"')
    _must_be_known("verify", verify, (True, False, "always"), 'True, False or "always"')
    if rounding == "exact" and not verify:
        raise PlanError('rounding="exact" needs the kernels to run, and verify=False runs none: drop one of them')
    return rounding == "exact"
