"""Find RMSNorms by structure alone; their behaviour then tells which variants they are."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fuseplug import Proposal, Rejection, Site, Target
from fuseplug.reading import names
from fuseplug_backends.dtypes import usual_mixes

from ..reference import VARIANTS, Variant
from .adapters import NormAdapter
from .examples import example_of, mixes_of
from .parts import NormParts, norm_parts

_MOST_ELEMENTS_CHECKED = 1 << 19
"""The largest size at which a kernel of this package asks to be checked."""


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Say whether *site* is built like an RMSNorm, and which variants it may be.

    A module is built like an RMSNorm if it is a leaf with at most one floating parameter or buffer, of one dimension or
    none, with an epsilon among its attributes or in its code, and with a forward that takes one tensor, or a tensor and
    a gate.
    """
    parts = norm_parts(site.module)
    if parts is None or isinstance(parts, Rejection):
        return parts
    weight = None if parts.weight is None else getattr(site.module, parts.weight)
    mixes = tuple(mixes_of(weight, parts))
    return [
        Proposal(
            target=Target(),
            adapters=tuple(_adapters(site.module, parts)),
            example=functools.partial(example_of, parts, _epsilon(site.module, parts)),
            mixes=mixes,
            # Without a weight, nothing tells the dtype of the module.
            likely=mixes[1:]
            if weight is None
            else [mix for mix in usual_mixes(mixes, site.device_type) if mix.weight is mixes[0].weight],
            # Four: a unit row, the weight, the gate and the result may each be rounded to the output's dtype.
            roundings=4.0,
            working_roundings=_working_roundings(parts.width),
        )
    ]


def _working_roundings(width: int) -> float:
    """Sixteen for the arithmetic of a row, forward and backward, plus the loss of a sum over all rows.

    A compiler adds the *n* terms of a weight's gradient one after the other, which ends up about √n / 5 roundings away
    from their sum: each partial sum is rounded, and these errors add up like a random walk.
    """
    return 16.0 + math.sqrt(_MOST_ELEMENTS_CHECKED / width) / 4


def _epsilon(module: nn.Module, parts: NormParts) -> float:
    likely = parts.eps[0]
    eps = getattr(module, likely) if isinstance(likely, str) else likely
    return torch.finfo(torch.float32).eps if eps is None else float(eps)


def _adapters(module: nn.Module, parts: NormParts) -> Iterator[NormAdapter]:
    gated, weights = parts.gate != "none", tuple(dict.fromkeys((parts.weight, None)))
    if "rms_norm" in names(type(module).forward, type(module)):
        # Bit for bit the same as "cast-last", except under autocast.
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
    rows = {name: row for name, row in VARIANTS.items() if (row.gate is not None) == gated and not row.native}
    if weight is not None:
        return rows
    distinct: dict[Variant, str] = {}
    for name, row in rows.items():
        if row.offset is None:
            distinct.setdefault(replace(row, weight="after-cast"), name)
    return distinct.values()


def _groupings(attributes: dict[str, Any]) -> list[tuple[str | None, str | None]]:
    """The ways to read the attributes named after groups: pairs (name of a size, name of a number of groups)."""
    groups = [name for name, v in attributes.items() if "group" in name and (v is None or type(v) is int)]
    sizes: list[tuple[str | None, str | None]] = [(name, None) for name in groups]
    numbers: list[tuple[str | None, str | None]] = [(None, name) for name in groups if attributes[name]]
    likely_first = sizes + numbers if any("size" in name for name in groups) else numbers + sizes
    return [*likely_first, (None, None)]
