"""What a module has of an RMSNorm: a weight, an epsilon, a gate; read from its attributes, signature and code."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from fuseplug import Rejection
from fuseplug.reading import constants, names, remembered
from fuseplug_backends.dtypes import MODEL_DTYPES

_LARGEST_EPS = 1e-2
"""A float of another name than eps is taken for one up to here."""

_ROOTS = frozenset({"rms_norm", "rsqrt", "sqrt"})
"""What the code of a norm says whose epsilon is written in it: one of these."""

_UNKNOWN_WIDTH = 64
"""The width a norm is tried with that has no weight and does not say how wide it is."""


@dataclass(frozen=True)
class NormParts:
    """What was found in a module, by attribute names.

    Attributes:
        weight: The one-dimensional parameter or buffer; ``None`` if there is none.
        eps: What the epsilon may be, as in `NormAdapter`.
        width: Size of the last dimension.
        gate: ``"none"``, ``"optional"`` or ``"required"``: what the forward takes besides x.
        single: Whether the weight has no dimension: one number for the whole row.
    """

    weight: str | None
    eps: tuple[str | float | None, ...]
    width: int
    gate: str
    single: bool = False


def norm_parts(module: nn.Module) -> NormParts | Rejection | None:
    """What *module* has, if it is built like an RMSNorm; an answer, if it nearly is; else ``None``."""
    # The order is that of cost: most of the modules of a model leave at the first line or the second.
    if module._modules:
        return _parametrized(module) or _around_a_norm(module)
    if _is_of_torch(type(module)):
        return None
    tensors = dict(_tensors(module))
    if len(tensors) > 1:
        return None
    weight = next(iter(tensors), None)
    shape = None if weight is None else _shape(tensors[weight])
    named = _find_eps(vars(module), by_name_only=not shape)
    eps = _written_eps(type(module)) if named is None else (named,)
    if not eps or (gate := _gate(type(module).forward)) is None:
        return None
    if weight is None or shape is None:
        return NormParts(None, eps, _declared_width(vars(module)), gate)
    if len(shape) > 1 or not tensors[weight].is_floating_point():
        return None
    if tensors[weight].dtype not in MODEL_DTYPES:
        return Rejection(f"{weight} is {tensors[weight].dtype}; supported are float32, bfloat16 and float16")
    # FSDP leaves a rank without elements of a weight an empty shard; it is whole again when it is used.
    return NormParts(weight, eps, (shape and shape[0]) or _declared_width(vars(module)), gate, single=not shape)


def _shape(weight: Tensor) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))  # DeepSpeed ZeRO-3 leaves empty placeholders


def _parametrized(module: nn.Module) -> Rejection | None:
    """An answer for a norm whose weight is computed anew at each use."""
    if list(module._modules) != ["parametrizations"] or _is_of_torch(type(module)):
        return None
    computed = list(cast("nn.Module", module._modules["parametrizations"])._modules)
    named = _find_eps(vars(module), by_name_only=True)
    if len(computed) + len(dict(_tensors(module))) != 1 or named is None or _gate(type(module).forward) is None:
        return None
    return Rejection(
        f"its {computed[0]} is computed by a parametrization; a weight that is a parameter is expected: "
        f"torch.nn.utils.parametrize.remove_parametrizations(norm, {computed[0]!r}) makes it one"
    )


def _around_a_norm(module: nn.Module) -> Rejection | None:
    """An answer for a norm that calls another and does more to it: what it calls is a site of its own."""
    if not type(module).__name__.endswith("Norm") or module._parameters:
        return None
    norms = [
        name
        for name, child in module._modules.items()
        if child is not None and isinstance(norm_parts(child), NormParts)
    ]
    if len(norms) != 1:
        return None
    return Rejection(f"it does more than normalise; its {norms[0]}, which does that, is fused by itself", kind="unlike")


def _is_of_torch(cls: type[nn.Module]) -> bool:
    """Whether the forward is one of torch's own modules, which says what it computes; one of them is an RMSNorm."""
    ours = cls.forward is nn.RMSNorm.forward
    return not ours and str(getattr(cls.forward, "__module__", "")).startswith("torch.nn.modules.")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # FSDP's flattened parameters are left on the module as plain attributes.
    for store in (module._parameters, module._buffers, vars(module)):
        for name, value in store.items():
            if isinstance(value, Tensor):
                yield name, value


def _find_eps(attributes: dict[str, Any], *, by_name_only: bool) -> str | None:
    """The name of the epsilon; without *by_name_only*, any attribute that may be one."""
    named = [name for name, value in attributes.items() if "eps" in name.lower() and _is_eps(value, or_none=True)]
    if named or by_name_only:
        return next(iter(named), None)
    return next((name for name, value in attributes.items() if _is_eps(value) and value <= _LARGEST_EPS), None)


def _written_eps(cls: type[nn.Module]) -> tuple[float | None, ...]:
    """What the epsilon may be if no attribute is; nothing if the code takes no root."""
    code_names = names(cls.forward, cls)
    if not _ROOTS & code_names.keys():
        return ()
    numbers = tuple(number for number in constants(cls.forward, cls) if 0 < number <= _LARGEST_EPS)
    return (*numbers, None) if "rms_norm" in code_names else numbers


def _is_eps(value: object, *, or_none: bool = False) -> bool:
    return (or_none and value is None) or (isinstance(value, float) and 0 <= value < math.inf)


@remembered
def _gate(forward: Callable[..., Any]) -> str | None:
    """How *forward* takes a gate; ``None`` if it takes anything but a tensor and perhaps a second one."""
    _, *parameters = inspect.signature(forward).parameters.values()
    if not 1 <= len(parameters) <= 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    if len(parameters) == 1:
        return "none"
    return {inspect.Parameter.empty: "required", None: "optional"}.get(parameters[1].default)


def _declared_width(attributes: dict[str, Any]) -> int:
    for name, value in attributes.items():
        if isinstance(value, tuple | list) and len(value) == 1:
            value = value[0]
        if type(value) is int and value > 1 and "group" not in name:
            return value
    return _UNKNOWN_WIDTH
