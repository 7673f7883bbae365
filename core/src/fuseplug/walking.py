"""A model as a list of places: each module once, with all its paths and the device it runs on."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .collecting import collection_paused
from .devices import Destination
from .errors import PlanError
from .verification import Signatures, StandIns


@dataclass(frozen=True)
class Place:
    """One module of a model.

    Attributes:
        module: The live module.
        paths: Every path at which it is found.
        alike: Its signature: places with the same are certainly alike.
        stand_in: What kernels are shown of it.
        device_type: Where it runs, or will.
        device: Where it can be checked now; ``None`` while it is on meta, or planned for a device that is not there.
    """

    module: nn.Module
    paths: tuple[str, ...]
    alike: int
    stand_in: nn.Module
    device_type: str
    device: torch.device | None


@collection_paused()
def walk(model: nn.Module, *, only: Sequence[str], skip: Sequence[str], device: Destination | None) -> list[Place]:
    """List the places of *model*, parents before children.

    Args:
        model: Any module.
        only: Globs of module paths; modules they match, and all below those, are listed, or all if there is none.
        skip: Globs of module paths; modules they match, and all below those, are left out, by whatever path.
        device: Where the model will run, if that is not where it is.

    Raises:
        PlanError: If a glob matches nothing.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    everything = [path for found in paths.values() for path in found]
    wanted = _below(everything, only, "only") if only else set(everything)
    unwanted = _below(everything, skip, "skip")
    devices, signatures = _Devices(paths), Signatures()
    stand_ins = StandIns(signatures)
    places = []
    for module, found in paths.items():
        if wanted.isdisjoint(found) or not unwanted.isdisjoint(found):
            continue
        now = devices.of(found[0])
        kind, usable = _planned_type(device, now), _usable(device, now)
        places.append(Place(module, tuple(found), signatures.of(module), stand_ins.of(module), kind, usable))
    return places


class _Devices:
    """Where each module runs: its own tensors say, else those below it, else those of the nearest module above."""

    def __init__(self, paths: dict[nn.Module, list[str]]) -> None:
        self._known: dict[str, torch.device] = {}
        for module, found in reversed(paths.items()):
            own = _own_device(module)
            for path in found:
                device = own or self._known.get(path)
                if device is not None:
                    self._known[path] = device
                    if path:
                        self._known.setdefault(path.rpartition(".")[0], device)

    def of(self, path: str) -> torch.device:
        for above in upwards(path):
            if above in self._known:
                return self._known[above]
        return torch.device("cpu")


def upwards(path: str) -> Iterator[str]:
    """*path*, the path above it, and so on to the root, ``""``."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _own_device(module: nn.Module) -> torch.device | None:
    # An offloaded module's tensors are on meta between calls; accelerate's hook knows where they will be.
    hook = module.__dict__.get("_hf_hook")
    for each in getattr(hook, "hooks", (hook,)):
        if (execution := getattr(each, "execution_device", None)) is not None:
            return torch.device(execution)
    for registry in (module._parameters, module._buffers):
        for tensor in registry.values():
            if tensor is not None:
                return tensor.device
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
