"""Makes kernel mappings from plans, for users of transformers' own ``use_kernels``.

transformers chooses kernels by the name of a layer (``RMSNorm``), and classes with different formulas share one name. A
mapping made here is for one model. It has a layer only if every module of that layer in the model was verified.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from fuseplug import manager
from fuseplug.contract import Target
from fuseplug.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from fuseplug.kernel_manager import AllOptions
    from fuseplug.planning import Plan
    from fuseplug.report import Report

Forward = Callable[..., Any]

__all__ = ["KernelMapping", "VerifiedLayer", "kernel_mapping"]


@dataclass(frozen=True)
class VerifiedLayer:
    """A layer repository, as the ``kernels`` package calls it. Nothing is downloaded.

    Attributes:
        layer: A module class whose ``forward`` calls the verified kernels, behind their guards.
    """

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        """The class from which ``kernelize`` takes the forward."""
        return self.layer


class KernelMapping(dict[str, dict[str, VerifiedLayer]]):
    """The verified layers of one model, by layer name and device type. The mapping goes into a ``KernelConfig``.

    Attributes:
        report: What the plan says about every module.
        left_out: Why the mapping lacks a layer, by layer name.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report
        self.left_out: dict[str, str] = {}


@dataclass
class _Layer:
    """The modules with one layer name, by path, and the replacement of their forward, by class."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    forwards: dict[type[nn.Module], Forward] = field(default_factory=dict)


def kernel_mapping(model: nn.Module, **options: Unpack[AllOptions]) -> KernelMapping:
    """Plan and check *model* as `KernelManager.apply_all` does, and return the result as a kernel mapping.

    The model is not changed. The mapping has the layers whose modules were all verified. Their forwards are those that
    ``apply_all`` would put on: the original computes calls that were not verified. For a device that is not here, and
    with ``verify=False``, the kernels were not run; the report says so.

    Args:
        model: A model with modules whose classes have a ``kernel_layer_name``. transformers gives them one if the
            ``kernels`` package is installed.
        **options: As in `KernelManager.plan`.

    Raises:
        PlanError: If no module of the model has a layer name, or none of its layers can be mapped; and as for
            `KernelManager.plan`.
    """
    plan = manager.plan(model, **options)
    layers = _layers(model)
    if not layers:
        raise PlanError(
            f"no module of {type(model).__name__} has a kernel_layer_name: transformers gives its classes one if a "
            "version of `kernels` that it accepts is installed; without, use manager.apply_all(model)",
            found=model,
        )
    mapping, planned = KernelMapping(plan.report), _planned(plan)
    devices = {path: entry.device_type for entry in plan.report.fused for path in entry.paths}
    named = {path for layer in layers.values() for path in layer.modules}
    for name, layer in layers.items():
        if why := _left_out(layer, planned, devices, plan, named):
            mapping.left_out[name] = why
        else:
            device = _named(devices[next(iter(layer.modules))])
            mapping[name] = {device: VerifiedLayer(_layer_class(name, layer.forwards))}
    if not mapping:
        reasons = "; ".join(f"{name}: {why}" for name, why in mapping.left_out.items())
        raise PlanError(f"no layer of {type(model).__name__} can be mapped: {reasons}", found=mapping.left_out)
    return mapping


def _layers(model: nn.Module) -> dict[str, _Layer]:
    layers: defaultdict[str, _Layer] = defaultdict(_Layer)
    for path, module in model.named_modules():
        if (name := getattr(type(module), "kernel_layer_name", None)) is not None:
            layers[str(name)].modules[path] = module
    return dict(layers)


def _planned(plan: Plan) -> dict[int, Forward]:
    """The replacements of whole forwards by kernels that replace nothing else, by the id of the module."""
    more = {patch.kernel_id for patch in plan.patches if patch.target != Target()}
    return {
        id(patch.module_ref()): patch.function
        for patch in plan.patches
        if patch.kernel_id not in more and patch.module_ref() is not None
    }


def _left_out(
    layer: _Layer, planned: Mapping[int, Forward], devices: Mapping[str, str], plan: Plan, named: Collection[str]
) -> str:
    """Why *layer* cannot be mapped; ``""`` if it can. Fills in the forwards of *layer*."""
    for path, module in layer.modules.items():
        where = f"{path or 'the model'} ({type(module).__name__})"
        forward = planned.get(id(module))
        if forward is None:
            return f"{where} was not verified, and transformers replaces all or none: {_why(plan, path, named)}"
        if layer.forwards.setdefault(type(module), forward) is not forward:
            return f"{where} needs another replacement than others of its class, which only apply_all makes"
    if len({devices[path] for path in layer.modules}) > 1:
        return "its modules are on devices of several types"
    signatures = [inspect.signature(cls.forward).parameters.values() for cls in layer.forwards]
    if len({tuple(parameter.kind for parameter in parameters) for parameters in signatures}) > 1:
        names = ", ".join(sorted(cls.__name__ for cls in layer.forwards))
        return f"the forwards of its classes take different arguments: {names}"
    return ""


def _why(plan: Plan, path: str, named: Collection[str]) -> str:
    answers = [entry for entry in plan.report.entries if path in entry.paths]
    whole = [entry for entry in answers if entry.target in (None, Target())]
    if reason := next((entry.why_not for entry in whole if entry.why_not), ""):
        return reason
    above = path.rpartition(".")[0]
    entry = next((entry for entry in plan.report.fused if above in entry.paths and entry.target == Target()), None)
    if entry is None:
        return "no kernel replaces its whole forward"
    whole_of = f"{entry.kernel_id} computes it with {above or 'the model'} ({entry.class_name})"
    if above in named:
        return whole_of
    return f"{whole_of}: apply_all after use_kernels puts that on, or the mapping, once the class has a layer name"


def _layer_class(name: str, forwards: Mapping[type[nn.Module], Forward]) -> type[nn.Module]:
    """A class without state. Its forward calls that in *forwards* for the module's class, or else the class's own."""
    from torch import nn

    @functools.wraps(next(iter(forwards)).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        return forwards.get(cls, cls.forward)(self, *args, **kwargs)

    forward.__name__ = "forward"  # a pickle finds a bound method by this name
    return type(f"Verified{name}", (nn.Module,), {"forward": forward, "can_torch_compile": True, "has_backward": True})


def _named(device_type: str) -> str:
    """The name that ``kernels`` has for a device type of torch."""
    import torch

    return "rocm" if device_type == "cuda" and torch.version.hip is not None else device_type
