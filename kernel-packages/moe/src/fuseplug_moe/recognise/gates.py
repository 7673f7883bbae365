"""Which gate a module has: found by calling it on a few numbers, and comparing it with the rows of the table.

A gate that does more than compute is not called, and so has no name. The kernels call a gate without a name as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug.reading import hazard, names

from ..reference import GATES, GateUpLayout, apply_gate

_LAYOUTS = ("concatenated", "interleaved")

OWN = "own"
"""The activation of an adapter that calls the module's own gate."""


def activation_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The activation that *module* holds: the child or attribute named so, or the only child that it could be."""
    attributes = {**vars(module), **module._modules}
    named = [value for name, value in attributes.items() if "act" in name.lower() and callable(value)]
    children = [child for child in module._modules.values() if child is not None and not _has_tensors(child)]
    return next(iter([*named, *(children if len(children) == 1 else [])]), None)


def written_activations(cls: type[nn.Module]) -> list[str]:
    """The rows of `GATES` that the forward of *cls* may call by name."""
    code_names = names(cls.forward, cls)
    return [gate for gate in _unclamped() if GATES[gate].row.code_names & code_names.keys()]


def scalar_named(module: nn.Module, word: str) -> str | None:
    """The name of the number among the attributes of *module* that has *word* in its name."""
    return next((name for name, value in vars(module).items() if word in name and type(value) in (int, float)), None)


def numbers_of_experts(module: nn.Module) -> list[int]:
    """How many experts there are, as each attribute of *module* says that speaks of it."""
    return [value for name, value in vars(module).items() if "expert" in name and type(value) is int]


def named_activation(activation: Callable[[Tensor], Tensor]) -> str | None:
    """The row of `GATES` that *activation*, of one tensor of any shape, computes; ``None`` if no row does."""
    x = torch.linspace(-8, 8, 67, device="cpu")
    candidates = [(name, functools.partial(_computed, name, "ungated", None, 1.0)) for name in _unclamped()]
    return next(_equal(activation, x, candidates), None)


def named_gate(gate: Callable[[Tensor], Tensor], limit: float | None, alpha: float) -> tuple[str, str] | None:
    """The row of `GATES` and the layout of *gate*, which maps ``(rows, 2 · inner)`` to ``(rows, inner)``."""
    reach = 2 * limit if limit and limit < 1e3 else 8.0
    columns = torch.arange(14, device="cpu") * 5 % 14
    rows = torch.linspace(-reach, reach, 11 * 14, device="cpu").view(11, 14)[:, columns]
    candidates = [
        ((name, layout), functools.partial(_computed, name, layout, limit, alpha))
        for name in GATES
        if limit is not None or GATES[name].clamp is None
        for layout in _LAYOUTS
    ]
    return next(_equal(gate, rows, candidates), None)


def _unclamped() -> Iterator[str]:
    return (name for name, gate in GATES.items() if gate.clamp is None)


def _computed(name: str, layout: str, limit: float | None, alpha: float, rows: Tensor) -> Tensor:
    return apply_gate(rows, None, name, layout, limit, alpha)


def _equal(
    function: Callable[[Tensor], Tensor], x: Tensor, candidates: Sequence[tuple[Any, Callable[[Tensor], Tensor]]]
) -> Iterator[Any]:
    if hazard(function):
        return
    try:
        expected = function(x)
    except Exception:  # noqa: BLE001 - a third party's activation may want other arguments, or parameters with values
        return
    if not isinstance(expected, Tensor) or expected.device != x.device:
        return
    for key, candidate in candidates:
        result = candidate(x)
        if result.shape == expected.shape and torch.allclose(result, expected, rtol=1e-5, atol=1e-6):
            yield key


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def own_gate(module: nn.Module, layout: GateUpLayout) -> Callable[[Tensor], Tensor]:
    """The gate of *module*: a function of the rows of its first projection, ``(pairs, inner or 2 · inner)``.

    The function returns ``(pairs, inner)``.

    Raises:
        TypeError: If the module has neither a gate nor an activation.
    """
    gate: Callable[[Tensor], Tensor] | None = getattr(module, "_apply_gate", None)
    if gate is not None and layout != "ungated":
        return gate
    return own_product(module, layout)


def own_product(module: nn.Module, layout: GateUpLayout) -> Callable[[Tensor], Tensor]:
    """As `own_gate`, for a module that has an activation but no gate."""
    activation = activation_of(module)
    if activation is None:
        raise TypeError(f"{type(module).__name__} has no activation")
    return activation if layout == "ungated" else functools.partial(product, activation)


def to_call(activation: str, module: nn.Module, layout: GateUpLayout) -> str | Callable[[Tensor], Tensor]:
    """An adapter's *activation* as `fuseplug_moe.reference.moe` takes it; for `OWN`, `own_product` of *module*."""
    return own_product(module, layout) if activation == OWN else activation


def named_or_own(activation: Callable[[Tensor], Tensor]) -> list[str]:
    """The names that *activation* may have: that of its row of `GATES`, if it is one, and `OWN`."""
    return [name for name in (named_activation(activation), OWN) if name]


def product(activation: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """``activation(gate) * up``, ``(..., inner)``, of rows with gate and up side by side, ``(..., 2 · inner)``."""
    gate, up = rows.chunk(2, dim=-1)
    return activation(gate) * up
