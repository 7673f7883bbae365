"""The parts of an RMSNorm in a module (weight, epsilon, gate), read from its attributes, signature and code."""

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
"""The largest number that is taken for an epsilon if it is not named eps."""

_ROOTS = frozenset({"rms_norm", "rsqrt", "sqrt"})
"""Names of which a norm's code contains at least one if the epsilon is written in the code."""

_UNKNOWN_WIDTH = 64
"""The width for trying a norm that has no weight and does not say how wide it is."""


@dataclass(frozen=True)
class NormParts:
    """The parts that were found in a module, by attribute name.

    Attributes:
        weight: The parameter or buffer, of at most one dimension; ``None`` if there is none.
        eps: The possible values of the epsilon, as in `NormAdapter`.
        width: Size of the last dimension.
        gate: Whether the forward takes a gate besides x: ``"none"``, ``"optional"`` or ``"required"``.
        single: Whether the weight has no dimension: one number for the whole row.
    """

    weight: str | None
    eps: tuple[str | float | None, ...]
    width: int
    gate: str
    single: bool = False


def norm_parts(module: nn.Module) -> NormParts | Rejection | None:
    """The parts of *module* if it is built like an RMSNorm; a rejection if it nearly is; otherwise ``None``."""
    # Cheap tests come first: most modules of a model leave at the first or the second.
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
    # FSDP leaves an empty shard on a rank that has no elements of a weight; the weight is whole again when it is used.
    return NormParts(weight, eps, (shape and shape[0]) or _declared_width(vars(module)), gate, single=not shape)


def _shape(weight: Tensor) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))  # DeepSpeed ZeRO-3 leaves empty placeholders


def _parametrized(module: nn.Module) -> Rejection | None:
    """A rejection for a norm whose weight is computed anew at each use."""
    if list(module._modules) != ["parametrizations"] or _is_of_torch(type(module)):
        return None
    computed = list(cast("nn.Module", module._modules["parametrizations"])._modules)
    named = _find_eps(vars(module), by_name_only=True)
    if len(computed) + len(dict(_tensors(module))) != 1 or named is None or _gate(type(module).forward) is None:
        return None
    return Rejection(
        f"its {computed[0]} is computed by a parametrization, but must be a parameter: "
        f"torch.nn.utils.parametrize.remove_parametrizations(norm, {computed[0]!r}) makes it one"
    )


def _around_a_norm(module: nn.Module) -> Rejection | None:
    """A rejection for a norm that calls another norm and does more: the other norm is a site of its own."""
    if not type(module).__name__.endswith("Norm") or module._parameters:
        return None
    norms = [
        name
        for name, child in module._modules.items()
        if child is not None and isinstance(norm_parts(child), NormParts)
    ]
    if len(norms) != 1:
        return None
    return Rejection(f"it does more than normalise; its {norms[0]} is fused as a site of its own", kind="unlike")


def _is_of_torch(cls: type[nn.Module]) -> bool:
    """Whether the forward is that of a module of torch other than `nn.RMSNorm`, so that its formula is known."""
    ours = cls.forward is nn.RMSNorm.forward
    return not ours and str(getattr(cls.forward, "__module__", "")).startswith("torch.nn.modules.")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # FSDP leaves its flattened parameters on the module as plain attributes.
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
    """The possible values of the epsilon if no attribute holds it; none if the code takes no root."""
    code_names = names(cls.forward, cls)
    if not _ROOTS & code_names.keys():
        return ()
    numbers = tuple(number for number in constants(cls.forward, cls) if 0 < number <= _LARGEST_EPS)
    return (*numbers, None) if "rms_norm" in code_names else numbers


def _is_eps(value: object, *, or_none: bool = False) -> bool:
    return (or_none and value is None) or (isinstance(value, float) and 0 <= value < math.inf)


@remembered
def _gate(forward: Callable[..., Any]) -> str | None:
    """How *forward* takes a gate; ``None`` if it takes anything but one or two tensors."""
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
