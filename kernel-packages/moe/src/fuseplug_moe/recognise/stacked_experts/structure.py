"""The parts of stacked experts: two tensors of three dimensions, perhaps biases, a norm, and a gate."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fuseplug import Proposal, Rejection
from fuseplug_backends.dtypes import MODEL_DTYPES

from ...reference import GATES, GateUpLayout
from .. import gates
from ..blocks import has_parameters, shapes_read
from ..gates import OWN, named_or_own
from ..indices import PARALLEL
from ..mixes import ExpertsMix, mixes
from ..proposals import inexact
from .adapters import StackedAdapter, StackedParts
from .examples import example_of, sizes_of

_IMPOSSIBLE = ("expert_idx == self.num_experts", "token_idx.numel() == 0", "top_k_index.numel() == 0")
"""Conditions in loops over the experts that were hit. Before the first is true, `one_hot` with that many classes
raises. An expert that was hit has tokens. And the original computes calls without tokens, where they differ."""


def match(module: nn.Module) -> list[Proposal] | Rejection | None:
    """Propose for *module* if it is built like stacked experts."""
    cubes = [name for name, p in module._parameters.items() if p is not None and p.dim() == 3]
    if len(cubes) > 2 and len(module._parameters[cubes[0]]) in gates.numbers_of_experts(module):  # type: ignore[arg-type]
        return Rejection(f"its experts have projections {', '.join(cubes)}; known are two, gate and up in one")
    if len(cubes) != 2:
        return None
    parts = _stacked_parts(module)
    if isinstance(parts, Rejection):
        # Many other modules have two tensors of three dimensions.
        return parts if gates.numbers_of_experts(module) else None
    dtype = getattr(module, parts.gate_up).dtype
    adapters = tuple(_adapters(module, parts))
    if parts.dense:
        adapters += tuple(replace(adapter, keeps_eval=True) for adapter in adapters)
    if not adapters:
        return Rejection(f"{type(module).__name__} has neither a gate of its own nor an activation to call")
    shared_out = (PARALLEL in vars(module) or parts.dense) and not parts.passing
    every = [*mixes(dtype), *([ExpertsMix(dtype, dtype, dtype, elsewhere=True)] if shared_out else [])]
    _, hidden, _ = sizes_of(module, parts)
    example = functools.partial(example_of, module, adapters[0])
    return [inexact(adapters, example, every, hidden, impossible=_IMPOSSIBLE)]


def flattened(module: nn.Module) -> Rejection | None:
    """An answer for experts whose weights are plain attributes: FSDP leaves them so when it flattens parameters."""
    cubes = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.dim() == 3]
    if len(cubes) < 2 or not gates.numbers_of_experts(module):
        return None
    return Rejection(
        f"its weights {', '.join(cubes)} are not its own parameters, because FSDP has flattened them: fuse "
        "before wrapping, or wrap with use_orig_params=True or fully_shard"
    )


def _stacked_parts(module: nn.Module) -> StackedParts | Rejection:
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    cubes = [name for name, p in parameters.items() if p.dim() == 3]
    first, second = sorted(cubes, key=lambda name: "down" in name)
    shape, then = (tuple(parameters[name].shape) for name in (first, second))
    passing = shape[0] > then[0] and any(isinstance(child, nn.Identity) for child in module._modules.values())
    read = shapes_read((then[0], *shape[1:]) if passing else shape, then)
    if read is None:
        return Rejection(
            f"the shapes of its experts disagree: {first} is {list(shape)}, {second} is {list(then)}; known are "
            "(experts, inner or 2 · inner, hidden) with (experts, hidden, inner), and both transposed"
        )
    transposed, halves = read
    count = next((n for n, v in vars(module).items() if n.startswith("num") and "expert" in n and type(v) is int), None)
    if count is not None and getattr(module, count) != then[0] and not _is_shared_out(module, count, then[0]):
        holding = second if passing else first
        return Rejection(f"it says {count}={getattr(module, count)}, but {holding} holds {then[0]} experts")
    dtypes = {p.dtype for p in parameters.values()}
    if len(dtypes) > 1 or not dtypes <= set(MODEL_DTYPES):
        several = ", ".join(sorted(str(dtype) for dtype in dtypes))
        return Rejection(f"its experts are {several}; supported is one of float32, bfloat16 and float16 for all")
    order = _order(type(module).forward)
    if order is None:
        return Rejection(
            f"its forward takes {inspect.signature(type(module).forward)}; known is (hidden states, indices, weights)"
        )
    width, hidden = (shape[2], then[2]) if transposed else (shape[1], then[1])
    flat = [name for name, p in parameters.items() if p.dim() != 3]
    roles: dict[tuple[int, ...], str] = {(shape[0], width): "gate_up_bias", (shape[0], hidden): "down_bias"}
    biases: dict[str, str] = {}
    for name in flat:
        role = "down_bias" if "down" in name else roles.get(tuple(parameters[name].shape))
        if role is None or role in biases:
            return Rejection(f"it has a parameter {name} {list(parameters[name].shape)} that no known experts have")
        biases[role] = name
    children = [name for name, child in module._modules.items() if child is not None and has_parameters(child)]
    post = [name for name in children if module._modules[name] is not gates.activation_of(module)]
    if len(post) > 1:
        return Rejection(f"it has children {', '.join(post)} with weights; known is one, a norm of each expert's rows")
    weights, weights_first = order
    dense = "is_transposed" not in vars(module) and "top" not in weights
    norm = next(iter(post), None)
    return StackedParts(first, second, transposed, halves, weights_first, dense, norm, passing, count, **biases)


def _is_shared_out(module: nn.Module, count: str, stacked: int) -> bool:
    """Whether the experts are divided among ranks: a DTensor says how many there are on all ranks."""
    here = getattr(module, count)
    return bool(getattr(module, PARALLEL, False)) and 0 < here < stacked and stacked % here == 0


def _order(forward: Callable[..., Any]) -> tuple[str, bool] | None:
    """The name of the weights' parameter, and whether it precedes the indices; ``None`` for another signature."""
    _, *parameters = inspect.signature(forward).parameters.values()
    if len(parameters) != 3 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    second, third = parameters[1].name, parameters[2].name
    weights_first = "weight" in second and "weight" not in third
    return second if weights_first else third, weights_first


def _adapters(module: nn.Module, parts: StackedParts) -> Iterator[StackedAdapter]:
    limit, alpha = gates.scalar_named(module, "limit"), gates.scalar_named(module, "alpha")
    for activation, layout in _gates(module, parts, limit, alpha):
        traits = [
            activation,
            "" if layout == "concatenated" else layout,
            "transposed" if parts.transposed else "",
            "biased" if parts.gate_up_bias else "",
            "post-norm" if parts.post else "",
            "passing" if parts.passing else "",
        ]
        clamps = activation in GATES and GATES[activation].clamp is not None
        bounds = (limit, alpha) if clamps else (None, None)
        yield StackedAdapter(" ".join(filter(None, traits)), parts, activation, layout, *bounds)


def _gates(
    module: nn.Module, parts: StackedParts, limit: str | None, alpha: str | None
) -> Iterator[tuple[str, GateUpLayout]]:
    """The gates that the module may have, each with its layout: its row of `GATES`, if it is one, and its own."""
    activation = gates.activation_of(module)
    gate = getattr(module, "_apply_gate", None)
    if parts.halves == 1:
        if activation is not None:
            yield from ((name, "ungated") for name in named_or_own(activation))
    elif gate is not None:
        bound = None if limit is None else float(getattr(module, limit))
        named = gates.named_gate(gate, bound, 1.702 if alpha is None else getattr(module, alpha))
        if named is not None:
            yield named  # type: ignore[misc]
        yield OWN, "concatenated"
    elif activation is not None:
        yield from ((name, "concatenated") for name in named_or_own(activation))
    else:
        rows = [name for name, gate in GATES.items() if limit is not None or gate.clamp is None]
        layouts: tuple[GateUpLayout, ...] = ("interleaved", "concatenated")
        yield from ((name, layout) for name in reversed(rows) for layout in layouts)
