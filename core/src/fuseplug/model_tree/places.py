"""A model as a list of places: each module once, with all its paths and the device it runs on."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fuseplug_verify import Refusal, StandIns

from ..contract import Rejection
from ..devices import Destination
from ..errors import PlanError
from ..patching.candidates import rejection_of
from ..patching.slots import attributes_of
from .flat_parameters import WHY as FLATTENED
from .flat_parameters import flattened
from .gc_paused import collection_paused

_MOST_PATHS = 256
"""How many paths of one module are listed. Modules that share children at each level have exponentially many."""

_UNREAD = -1
"""The signature of modules that must not be read. No other module has it."""


@dataclass(frozen=True)
class Place:
    """One module of a model.

    Attributes:
        module: The live module.
        paths: The paths at which the module is found.
        alike: The signature of the module. Modules with the same signature certainly behave alike.
        stand_in: What kernels see instead of the module.
        device_type: The type of device on which it runs or will run.
        device: The device on which it can be checked now; ``None`` while it is on meta, or planned for a device that is
            not present.
        fault: Why the module cannot be examined, if it cannot. Its stand-in is then an empty module.
    """

    module: nn.Module
    paths: tuple[str, ...]
    alike: int
    stand_in: nn.Module
    device_type: str
    device: torch.device | None
    fault: Rejection | None = None


@collection_paused()
def walk(model: nn.Module, *, only: Sequence[str], skip: Sequence[str], device: Destination | None) -> list[Place]:
    """List the places of *model*, parents before children.

    Args:
        model: Any module.
        only: Globs of module paths. Modules that they match, and all below these, are listed; without globs, all are.
        skip: Globs of module paths. Modules that they match, and all below these, are left out under all their paths.
        device: Where the model will run, if that is not where it is.

    Raises:
        PlanError: If a glob matches nothing.
    """
    modules = everywhere(model)
    everything = [path for located in modules.values() for path in located.paths]
    wanted = _below(everything, only, "only") if only else set(everything)
    unwanted = _below(everything, skip, "skip")
    devices, stand_ins = _Devices(modules), StandIns()
    units = _flat_units(modules)
    unreadable = {above for holders in units.values() for path in holders for above in upwards(path)}
    places = []
    for number, located in modules.items():
        module, paths = located.module, tuple(located.paths)
        if number in units and not (wanted - unwanted).isdisjoint(units[number]):
            kind = _planned_type(device, devices.of(paths[0]))
            why = Rejection(FLATTENED)
            places.append(Place(module, paths, _UNREAD, nn.Module(), device_type=kind, device=None, fault=why))
        if not unreadable.isdisjoint(paths):
            continue
        if wanted.isdisjoint(paths) or not unwanted.isdisjoint(paths):
            continue
        now = devices.of(paths[0])
        kind, usable = _planned_type(device, now), _usable(device, now)
        alike, stand_in = stand_ins.likeness(module), stand_ins.of(module)
        refusal = stand_ins.fault(module)
        fault = None if refusal is None else _fault(paths[0], refusal)
        places.append(Place(module, paths, alike, stand_in, device_type=kind, device=usable, fault=fault))
    return places


def _flat_units(modules: Mapping[int, Located]) -> dict[int, set[str]]:
    """The FSDP units, by id, with the paths of the modules whose parameters they have flattened."""
    units = {number: flattened(located.module) for number, located in modules.items()}
    return {
        number: {path for holder in holders if holder in modules for path in modules[holder].paths}
        for number, holders in units.items()
        if holders
    }


@dataclass
class Located:
    """A module of a model, and its paths.

    Attributes:
        module: The module.
        paths: The paths of the module.
    """

    module: nn.Module
    paths: list[str]


def everywhere(model: nn.Module) -> dict[int, Located]:
    """Every module by its ``id``, parents before children, with its paths. No path contains a module twice.

    A module whose registry of children cannot be read has no children here; `Place.fault` says why.
    """
    modules: dict[int, Located] = {}
    waiting: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", model, ())]
    while waiting:
        path, module, above = waiting.pop()
        number = id(module)
        located = modules.setdefault(number, Located(module, []))
        if number in above or len(located.paths) == _MOST_PATHS:
            continue
        located.paths.append(path)
        inside, above = f"{path}." if path else "", (*above, number)
        with contextlib.suppress(Exception):  # a third party's registry may raise anything
            children = reversed(attributes_of(module)["_modules"].items())
            modules_inside = [(name, child) for name, child in children if issubclass(type(child), nn.Module)]
            waiting += [(f"{inside}{name}", child, above) for name, child in modules_inside]
    return modules


def _fault(path: str, refusal: Refusal) -> Rejection:
    where = f"skip={path!r}" if path else "skip="
    if refusal.kind != "error":
        return rejection_of(refusal)
    return Rejection(
        f"it cannot be examined: {refusal.reason}. Expected a module whose registries and attributes can be read; "
        f"correct its class, or leave it out with {where}",
        kind="error",
    )


class _Devices:
    """The device of each module: that of its own tensors, else of those below it, else of the nearest module above."""

    def __init__(self, modules: Mapping[int, Located]) -> None:
        self._devices: dict[str, torch.device] = {}
        for located in reversed(list(modules.values())):
            of_tensors = _own_device(located.module)
            for path in located.paths:
                device = of_tensors or self._devices.get(path)
                if device is not None:
                    self._devices[path] = device
                    if path:
                        self._devices.setdefault(path.rpartition(".")[0], device)

    def of(self, path: str) -> torch.device:
        for above in upwards(path):
            if above in self._devices:
                return self._devices[above]
        return torch.device("cpu")


def upwards(path: str) -> Iterator[str]:
    """*path*, the path above it, and so on to the root, ``""``."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _own_device(module: nn.Module) -> torch.device | None:
    try:
        attributes = attributes_of(module)
        # An offloaded module's tensors are on meta between calls; accelerate's hook knows where they will be.
        hook = attributes.get("_hf_hook")
        for part in getattr(hook, "hooks", (hook,)):
            if (execution := getattr(part, "execution_device", None)) is not None:
                return torch.device(execution)
        for registry in (attributes["_parameters"], attributes["_buffers"]):
            for tensor in registry.values():
                if tensor is not None:
                    return torch.device(tensor.device)
    except Exception:  # noqa: BLE001 - a foreign tensor or hook may raise anything; what cannot be read is reported
        return None
    return None


def _planned_type(device: Destination | None, now: torch.device) -> str:
    if device is not None:
        return device.type
    if now.type != "meta":
        return now.type
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


def _usable(device: Destination | None, now: torch.device) -> torch.device | None:
    if now.type == "meta":
        return None
    if device is None or device.type == now.type:
        return now
    return device.device


def _below(paths: Sequence[str], globs: Sequence[str], argument: str) -> set[str]:
    hit: set[str] = set()
    for glob in globs:
        matched = set(fnmatch.filter(paths, glob)) if glob else {""}
        if not matched:
            near = difflib.get_close_matches(glob, paths, n=3, cutoff=0.4)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise PlanError(
                f"{argument}={glob!r} matches none of the {len(paths)} module paths of this model{hint}. "
                "Paths are those of model.named_modules(), * matches dots too.",
                glob=glob,
            )
        hit |= matched
    return {path for path in paths if any(above in hit for above in upwards(path))} if hit else hit
