"""Finds gated delta rules in the functions that the methods of a module look up."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug import Consent, Example, Proposal, Rejection, Site, Target
from fuseplug_backends.dtypes import MODEL_DTYPES, usual_mixes
from fuseplug_backends.looked_up import looked_up, positional_parameters

from ..reference import VARIANTS, Variant
from .adapters import DeltaRuleAdapter

_INPUTS, _STATES = ("query", "key", "value", "g", "beta"), ("initial_state", "output_final_state")
"""The first parameters of a gated delta rule. The size of chunks is between the two, except in steps of decoding."""

_LARGE = 1 << 10
"""The number of elements from which on an example has more heads and channels, and several segments of chunks."""

_ROUNDINGS = 4.0
"""One rounding of the result or of a gradient, and one of the sum over the heads of a key head. Doubled for autocast,
under which the original rounds the factors of its matmuls."""

_WORKING_ROUNDINGS = 16.0 + 2 * 10.0 + 75.0
"""Sixteen for the arithmetic. A result is a sum over the tokens before it and the channels of a key, 200 and 8 in the
largest check, and its gradient goes the same way back: √n / 4 for each of the two. The sums of g in a chunk reach 150,
and originals round them to float32 before they take differences: half of eps for each unit."""


_CONSENT = Consent(
    "packed_sequences",
    "packed sequences are computed one by one; transformers raises an error for them, so nothing can be compared",
)


class DeltaRuleMix(NamedTuple):
    """One combination to check.

    Attributes:
        x: The dtype of q, k, v and beta.
        g: The dtype of g.
        continued: Whether the call has an initial state, and asks for the final one.
        normalised: Whether the function normalises q and k.
        repeats: How many heads a key head serves.
        prefill: Whether the call asks for the final state, and has no initial one. A decoding step always has one.
    """

    x: torch.dtype
    g: torch.dtype
    continued: bool = False
    normalised: bool = True
    repeats: int = 1
    prefill: bool = False


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Propose a gated delta rule for each function with its signature that a method looks up.

    The signature does not say whether heads or channels have decays. Both variants are proposed: the function takes the
    examples of one.
    """
    module = site.module
    if next(module.children(), None) is None:
        return None
    targets = dict(_targets(type(module)))
    if not targets and any(map(_computes_it, vars(module).values())):
        return Rejection(
            "its gated delta rule is an attribute of the module, as in transformers 4.57; what is replaced is a "
            "function that a method looks up, as in transformers 5.23"
        )
    own = next((parameter.dtype for parameter in module.parameters() if parameter.dim() == 2), torch.float32)
    # The proposals for packed sequences come first: with the user's consent, they are taken.
    return [
        _proposal(site, own, variant, target, is_step, packed)
        for packed in (True, False)
        for target, is_step in targets.items()
        for variant in VARIANTS.values()
        if not (packed and is_step)
    ] or None


def _targets(cls: type) -> Iterator[tuple[Target, bool]]:
    """The functions that methods of *cls* look up, and whether each is for steps of decoding."""
    for target, function in looked_up(cls, _computes_it):
        if target.method != "__init__":
            yield target, "chunk_size" not in positional_parameters(function)


def _computes_it(value: object) -> bool:
    """Whether *value* is a function with the signature of a gated delta rule."""
    if not isinstance(value, types.FunctionType):
        return False
    names = tuple(name for name in positional_parameters(value) if name != "chunk_size")
    return names[: len(_INPUTS) + len(_STATES)] == (*_INPUTS, *_STATES)


def _proposal(site: Site, own: torch.dtype, variant: Variant, target: Target, is_step: bool, packed: bool) -> Proposal:
    mixes = _mixes(own, variant, is_step)
    return Proposal(
        target=target,
        adapters=(DeltaRuleAdapter(variant.name, is_step, packed),),
        example=functools.partial(_example, variant, is_step),
        mixes=mixes,
        likely=usual_mixes(mixes, site.device_type),
        roundings=_ROUNDINGS,
        working_roundings=_WORKING_ROUNDINGS,
        exact=False,
        consent=_CONSENT if packed else None,
    )


def _mixes(own: torch.dtype, variant: Variant, is_step: bool) -> tuple[DeltaRuleMix, ...]:
    """Every combination to check, the module's own first."""
    pairs = [(dtype, torch.float32) for dtype in MODEL_DTYPES] + [(dtype, dtype) for dtype in MODEL_DTYPES[:2]]
    pairs.sort(key=lambda pair: pair != (own, torch.float32))
    mixes = [DeltaRuleMix(*pair, continued=continued) for pair in pairs for continued in (False, True)]
    mixes += [] if is_step else [mixes[0]._replace(prefill=True)]
    # Kimi Delta Attention has as many heads of keys as of values.
    return (*mixes, mixes[0]._replace(normalised=False, repeats=1 if variant.per_channel else 2))


def _example(variant: Variant, is_step: bool, mix: DeltaRuleMix, size: int, generator: torch.Generator) -> Example:
    """A call like those of mixers, with the shapes of `fuseplug_gated_delta_rule.reference.gated_delta_rule`.

    Some keys and queries are short, so that the number that is added to their lengths shows. In large examples, some
    decays are so strong that the inverse of their product in a chunk overflows.
    """
    batch, key_heads, channels, values = (2, 3, 4, 6) if size < _LARGE else (4, 4, 8, 12)
    tokens, heads = 5 + size // (batch * key_heads * channels), key_heads * mix.repeats
    if is_step:  # more sequences in the place of more tokens
        batch, tokens = 2 + size // (5 * key_heads * channels), 5 if mix.continued else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    def every(number: int, this: float) -> Tensor:
        """*this* for one token in *number*, and 1 for the others."""
        return torch.where(torch.arange(tokens, device="cpu") % number == number - 1, this, 1.0).view(1, tokens, 1, 1)

    q, k = (
        (functional.normalize(normal(batch, tokens, key_heads, channels), dim=-1) * every(3, 0.05)).to(mix.x)
        for _ in range(2)
    )
    g = -normal(batch, tokens, heads, channels if variant.per_channel else 1).div(2).exp() / 2
    g = g * every(16, 50.0)
    g = (g if variant.per_channel else g.squeeze(-1)).to(mix.g)
    v, beta = (x.to(mix.x) for x in (normal(batch, tokens, heads, values), 2 * normal(batch, tokens, heads).sigmoid()))
    state = normal(batch, heads, channels, values) if mix.continued else None
    flags = {"output_final_state": mix.continued or mix.prefill, "use_qk_l2norm_in_kernel": mix.normalised}
    return Example([q, k, v, g, beta], kwargs={"initial_state": state, **flags})
