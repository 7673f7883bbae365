"""The gated MLPs that a module may be. They are few, because a forward can do nothing that it does not mention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from fuseplug_backends.activations import ACTIVATIONS

from ..reference import LAYOUTS
from .adapters import Beside, CallChild, CastTo, Drop, GatedAdapter, Multiply
from .code_names import names_in

_WIDENS = frozenset({"float", "float32"})
_CLAMPS = frozenset({"clamp", "clamp_", "clip", "clip_", "minimum", "min", "max"})
_QUANTILES = frozenset({"icdf", "erfinv", "std", "var", "quantile"})
"""Names in the code of a forward that widens, clamps, or cuts at a quantile."""


class Projections(NamedTuple):
    """The names of the linear children, by role.

    Attributes:
        gate: The child that gives the gate or up, or both in one.
        up: The child that gives the other one; ``None`` if *gate* gives both.
        down: The child that follows; ``None`` if there is none.
        extra: The children that precede, and keep the width.
    """

    gate: str
    up: str | None
    down: str | None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mentioned:
    """What a forward mentions, by name.

    Attributes:
        module: The stand-in.
        linears: Linear children, and their widths in and out.
        roles: The ways in which they can be the projections.
        drops: Dropout children.
        norms: Norm children, and their widths.
        leaves: Children without tensors: one of them may be the activation.
        scales: Parameters of one element.
        numbers: Numbers that are not widths.
        widths: Numbers that are widths, and their values.
        code_names: All names in its code, with the order of their first mention.
    """

    module: nn.Module
    linears: Mapping[str, tuple[int, int]]
    roles: tuple[Projections, ...]
    drops: tuple[str, ...]
    norms: Mapping[str, int]
    leaves: tuple[str, ...]
    scales: tuple[str, ...]
    numbers: tuple[str, ...]
    widths: Mapping[str, int]
    code_names: Mapping[str, int]

    @property
    def casts_to_a_weight(self) -> bool:
        """Whether the forward may look at the dtype of a projection's weight."""
        return {"dtype", "weight"} <= self.code_names.keys()


@dataclass(frozen=True)
class _Form:
    """A variant of the op, the names of its numbers, and the steps that no child does."""

    variant: str = "plain"
    numbers: tuple[tuple[str, str], ...] = ()
    between: tuple[Beside, ...] = ()
    after: tuple[Beside, ...] = ()


def adapters_for(mentioned: Mentioned) -> Iterator[GatedAdapter]:
    """Every combination of independent choices that *mentioned* leaves open, the likely ones first."""
    activations = _activations(mentioned)
    for roles in mentioned.roles:
        forms = _forms(mentioned, roles)
        for (before, between, after), form in itertools.product(_places(mentioned, roles), forms):
            for gate, up, layout in _assignments(roles):
                for activation in activations if "beta" not in dict(form.numbers) else ("swish",):
                    yield GatedAdapter(
                        activation=activation,
                        gate=gate,
                        up=up,
                        down=roles.down,
                        up_called_first=up is not None and mentioned.code_names[up] < mentioned.code_names[gate],
                        form=form.variant,
                        layout=layout,
                        numbers=form.numbers,
                        before=before,
                        between=(*between, *form.between),
                        after=(*form.after, *after),
                    )


def _activations(mentioned: Mentioned) -> tuple[str, ...]:
    """The activations that are named in the forward or in the values that it uses; all if none is named."""
    values = {name: value for name, value in vars(mentioned.module).items() if name in mentioned.code_names}
    leaves = [mentioned.module._modules[leaf] for leaf in mentioned.leaves]
    all_names = {*mentioned.code_names, *(name for value in (*values.values(), *leaves) for name in names_in(value))}
    named = tuple(name for name, activation in ACTIVATIONS.items() if activation.code_names & all_names)
    return named or tuple(ACTIVATIONS)


def _assignments(roles: Projections) -> Iterator[tuple[str, str | None, str]]:
    """The possible assignments of gate, up and layout."""
    if roles.up is None:
        yield from ((roles.gate, None, layout) for layout in LAYOUTS)
    else:
        yield roles.gate, roles.up, LAYOUTS[0]
        yield roles.up, roles.gate, LAYOUTS[0]


def _places(mentioned: Mentioned, roles: Projections) -> Iterator[tuple[tuple[Beside, ...], ...]]:
    """Where the other children may be called: before the projections, between them, or after them."""
    width_in, width_out = mentioned.linears[roles.gate]
    fits = {"before": width_in, "between": width_out if roles.up else width_out // 2}
    if roles.down is not None:
        fits["after"] = mentioned.linears[roles.down][1]
    choices: dict[str, list[tuple[str, ...]]] = {extra: [("before",)] for extra in roles.extra}
    for norm, width in mentioned.norms.items():
        choices[norm] = [(place,) for place, fitting in fits.items() if fitting == width]
    for leaf in mentioned.leaves:
        # One leaf is the activation, which the op computes. The others are called before the projections.
        choices[leaf] = [(), ("before",)]
    for drop in mentioned.drops:
        choices[drop] = [(place,) for place in fits if place != "before"]
        choices[drop] += [("between", "after")] if len(mentioned.drops) == 1 and roles.down is not None else []
    for places in itertools.product(*choices.values()):
        at = dict(zip(choices, places, strict=True))
        if sum(not at[leaf] for leaf in mentioned.leaves) == min(1, len(mentioned.leaves)):
            yield from itertools.product(*(_orders(mentioned, at, place) for place in ("before", "between", "after")))


def _orders(mentioned: Mentioned, at: Mapping[str, tuple[str, ...]], place: str) -> list[tuple[Beside, ...]]:
    """The orders in which the children at *place* may be called.

    First projections, then norms, then children without weights; or as they are mentioned; or the other way round,
    because a call inside another call is mentioned after it.
    """
    by_kind = tuple(CallChild(name) for name in at if place in at[name])
    in_order = tuple(sorted(by_kind, key=lambda call: mentioned.code_names[call.child]))
    return list(dict.fromkeys((by_kind, in_order, in_order[::-1])))


def _forms(mentioned: Mentioned, roles: Projections) -> list[_Form]:
    """The forms that the numbers in the forward allow, given what else it mentions."""
    forms, numbers, code_names = [_Form()], mentioned.numbers, mentioned.code_names.keys()
    pairs = list(itertools.permutations(numbers, 2))
    if code_names & _WIDENS:
        forms += [_Form("wide")]
    if code_names & _CLAMPS:
        forms += [_Form(f"clamp-{when}", (("limit", limit),)) for when in ("before", "after") for limit in numbers]
        forms += [_Form("clamp-before-offset", (("limit", limit), ("beta", beta))) for limit, beta in pairs]
    elif code_names & _QUANTILES:
        forms += [_Form("sparse", (("sparsity", share),)) for share in numbers]
    elif "dropout" in code_names:
        forms += [_Form(between=(Drop(probability),)) for probability in numbers]
        forms += [_Form(after=(Drop(probability),)) for probability in numbers]
    else:
        forms += [_Form("scaled", (("scale", scale),)) for scale in numbers]
        forms += [_Form(after=(Multiply(factor),)) for factor in numbers]
        forms += [_Form("scaled", (("scale", scale),), after=(Multiply(factor),)) for scale, factor in pairs]
    for scale in mentioned.scales:
        forms += [replace(form, after=(*form.after, Multiply(scale))) for form in forms]
    if roles.down is not None and mentioned.casts_to_a_weight:
        forms += [replace(form, between=(*form.between, CastTo(roles.down))) for form in forms]
    return forms
