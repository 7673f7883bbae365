"""Where an RMSNorm is found in a module: by structure alone, leaving to behaviour which variant it is."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute, Example, Proposal, Rejection, Site, Target
from fuseplug.reading import constants, names, remembered
from fuseplug_backends.dtypes import MODEL_DTYPES

from ..reference import VARIANTS, Variant

_MIXED = (
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
)

_LARGEST_EPS = 1e-2
"""A float of another name than eps is taken for one up to here."""

_ROOTS = frozenset({"rms_norm", "rsqrt", "sqrt"})
"""What the code of a norm says whose epsilon is written in it: one of these."""

_MOST_ELEMENTS_CHECKED = 1 << 19
"""The largest size that a kernel here asks to be checked at."""

_UNKNOWN_WIDTH = 64
"""The width a norm is tried with that has no weight and does not say how wide it is."""


class NormMix(NamedTuple):
    """One combination to check: the dtypes of x (and of the gate) and of the weight, and whether a gate is given."""

    x: torch.dtype
    weight: torch.dtype
    gate: bool = False


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


@dataclass(frozen=True)
class NormAdapter(Adapter):
    """Calls an RMSNorm with what the module holds at the time of the call.

    Attributes:
        variant: A key of `fuseplug_rmsnorm.reference.VARIANTS`.
        weight: Name of the weight; ``None`` for a norm that has or uses none.
        eps: Name of the epsilon; or the number that is written in the code. A ``None``, here or under that name, is the
            machine epsilon of the dtype that is computed in.
        group_size: Name of the attribute that says how many neighbours are normalised together.
        groups: Name of the attribute that says in how many groups the row is cut.
        gated: Whether the forward takes a gate.
        single: Whether the weight is one number for the whole row.
    """

    variant: str
    weight: str | None
    eps: str | float | None
    group_size: str | None = None
    groups: str | None = None
    gated: bool = False
    single: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The weight, the epsilon and the size or number of groups."""
        eps = self.eps if isinstance(self.eps, str) else None
        return tuple(name for name in (self.weight, eps, self.group_size, self.groups) if name is not None)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states)``, with a ``gate`` after it where the module takes one.

        Both are ``(..., hidden)``, of any floating dtype. Result and errors are those of `reference.rms_norm`.
        """
        if self.gated or self.group_size or self.groups or self.single:
            return self._bind_any(compute)
        variant, weight, epsilon = self.variant, self.weight, self.eps
        named = isinstance(epsilon, str)

        # Lean, because at one token this function is what the caller waits for.
        def forward(module: nn.Module, hidden_states: Tensor) -> Any:
            eps = getattr(module, epsilon) if named else epsilon  # type: ignore[arg-type]
            if eps is None:
                eps = _machine_epsilon(hidden_states)
            scale = None if weight is None else getattr(module, weight)
            return compute(hidden_states, scale, eps, variant=variant)

        return forward

    def _bind_any(self, compute: Compute) -> Callable[..., Any]:
        adapter = self

        def gated(module: nn.Module, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
            eps = getattr(module, adapter.eps) if isinstance(adapter.eps, str) else adapter.eps
            return compute(
                hidden_states,
                adapter._scale(module, hidden_states),
                _machine_epsilon(hidden_states) if eps is None else eps,
                variant=adapter.variant,
                gate=gate,
                group_size=adapter._neighbours(module, hidden_states),
            )

        def ungated(module: nn.Module, hidden_states: Tensor) -> Any:
            return gated(module, hidden_states)

        return gated if self.gated else ungated

    def _scale(self, module: nn.Module, hidden_states: Tensor) -> Tensor | None:
        if self.weight is None:
            return None
        scale: Tensor = getattr(module, self.weight)
        return scale.expand(hidden_states.shape[-1:]) if self.single else scale

    def _neighbours(self, module: nn.Module, hidden_states: Tensor) -> int | None:
        if self.groups is not None:
            return hidden_states.shape[-1] // int(getattr(module, self.groups))
        return None if self.group_size is None else getattr(module, self.group_size)


def _machine_epsilon(hidden_states: Tensor) -> float:
    """What ``nn.RMSNorm`` takes for an eps of ``None``: that of the dtype it computes in."""
    return torch.finfo(torch.promote_types(hidden_states.dtype, torch.float32)).eps


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Say whether *site* is built like an RMSNorm, and which variants it may be.

    It is if it is a leaf with at most one floating parameter or buffer, of one dimension or none, an epsilon among its
    attributes, and a forward that takes one tensor, or a tensor and a gate.
    """
    parts = _norm_parts(site.module)
    if parts is None or isinstance(parts, Rejection):
        return parts
    weight = None if parts.weight is None else getattr(site.module, parts.weight)
    mixes = tuple(_mixes(weight, parts))
    return [
        Proposal(
            target=Target(),
            adapters=tuple(_adapters(site.module, parts)),
            example=functools.partial(_example, parts, _epsilon(site.module, parts)),
            mixes=mixes,
            # What autocast makes of the input of a norm that has its weight in float32.
            likely=tuple(
                mix
                for mix in mixes[1:]
                # Without a weight nothing says in which dtype the module stands.
                if weight is None or (mix.weight is mixes[0].weight and mix.x in (mixes[0].x, torch.bfloat16))
            ),
            # Four: a unit row, the weight, the gate and the result may each be rounded to the output's dtype.
            roundings=4.0,
            working_roundings=_working_roundings(parts.width),
        )
    ]


def _working_roundings(width: int) -> float:
    """Sixteen for the arithmetic of a row, forward and backward, and what a sum over all rows loses.

    Added one after the other, as compilers do, the *n* terms of a weight's gradient end up about √n / 5 roundings away
    from their sum: each partial sum is rounded, and these errors add up like a random walk.
    """
    return 16.0 + math.sqrt(_MOST_ELEMENTS_CHECKED / width) / 4


def _norm_parts(module: nn.Module) -> NormParts | Rejection | None:
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
        if child is not None and isinstance(_norm_parts(child), NormParts)
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


def _epsilon(module: nn.Module, parts: NormParts) -> float:
    likely = parts.eps[0]
    eps = getattr(module, likely) if isinstance(likely, str) else likely
    return torch.finfo(torch.float32).eps if eps is None else float(eps)


def _adapters(module: nn.Module, parts: NormParts) -> Iterator[NormAdapter]:
    gated, weights = parts.gate != "none", tuple(dict.fromkeys((parts.weight, None)))
    if "rms_norm" in names(type(module).forward, type(module)):
        # Bitwise "cast-last" as well, but told from it under autocast.
        yield from (
            NormAdapter("torch", weight, eps, single=parts.single and weight is not None)
            for weight, eps in itertools.product(weights, parts.eps)
        )
    if type(module).forward is nn.RMSNorm.forward:
        return
    for weight, (group_size, groups) in itertools.product(weights, _groupings(vars(module))):
        for variant, eps in itertools.product(_variants(gated, weight), parts.eps):
            yield NormAdapter(variant, weight, eps, group_size, groups, gated, parts.single and weight is not None)


def _variants(gated: bool, weight: str | None) -> Iterable[str]:
    """Names of the variants that can be told apart, with a gate or without, with a weight or without."""
    rows = {name: how for name, how in VARIANTS.items() if (how.gate is not None) == gated and not how.native}
    if weight is not None:
        return rows
    distinct: dict[Variant, str] = {}
    for name, how in rows.items():
        if how.offset is None:
            distinct.setdefault(replace(how, weight="after-cast"), name)
    return distinct.values()


def _groupings(attributes: dict[str, Any]) -> list[tuple[str | None, str | None]]:
    """The ways to read the attributes that speak of groups, as names of (a size, a number of groups)."""
    groups = [name for name, v in attributes.items() if "group" in name and (v is None or type(v) is int)]
    sizes: list[tuple[str | None, str | None]] = [(name, None) for name in groups]
    numbers: list[tuple[str | None, str | None]] = [(None, name) for name in groups if attributes[name]]
    likely_first = sizes + numbers if any("size" in name for name in groups) else numbers + sizes
    return [*likely_first, (None, None)]


def _mixes(weight: Tensor | None, parts: NormParts) -> Iterator[NormMix]:
    pairs = [(dtype, dtype) for dtype in MODEL_DTYPES]
    if weight is not None:
        pairs = [*sorted(pairs, key=lambda pair: pair[1] is not weight.dtype), *_MIXED]
    for x, w in pairs:
        yield NormMix(x, w, parts.gate != "none")
    if parts.gate == "optional":
        yield NormMix(*pairs[0], gate=False)


def _example(parts: NormParts, eps: float, mix: NormMix, size: int, generator: torch.Generator) -> Example:
    """Rows of several magnitudes: where eps does not matter, where nothing else does, and where squares are large.

    Returns:
        x, and the gate if *mix* has one, ``(2, tokens, width)`` in the dtype of x; the weight ``(width,)``, or
        ``()`` for a single number, in its own.
    """
    near_eps = math.sqrt(eps) or 1e-3
    magnitudes = [1.0, near_eps, 16.0, 0.25 * near_eps, 1.0, 0.0 if eps > 0 else 4.0]
    tokens = max(3, math.ceil(size / parts.width / 2))
    scale = torch.tensor(magnitudes, device="cpu").repeat(math.ceil(2 * tokens / len(magnitudes)))[: 2 * tokens]

    def normal() -> Tensor:
        return torch.randn(2, tokens, parts.width, generator=generator, dtype=torch.float32, device="cpu")

    x = (normal() * scale.view(2, tokens, 1)).to(mix.x)
    gate = (normal().to(mix.x),) if mix.gate else ()
    if parts.weight is None:
        return Example((x, *gate))
    if parts.single:
        weight = 1.0 + 0.3 * torch.randn((), generator=generator, dtype=torch.float32, device="cpu")
        return Example((x, *gate), {parts.weight: weight.to(mix.weight)})
    # Around 1 and around 0 by turns, for w and 1 + w alike are told from each other and from their roundings there.
    weight = 0.3 * torch.randn(parts.width, generator=generator, dtype=torch.float32, device="cpu")
    weight[::2] += 1.0
    return Example((x, *gate), {parts.weight: weight.to(mix.weight)})
