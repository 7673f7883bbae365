"""The gated delta rule in plain PyTorch, one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseplug_backends.dtypes import working_dtype

__all__ = ["EPS", "VARIANTS", "Variant", "compute", "gated_delta_rule", "working_dtype"]

EPS = 1e-6
"""The number that is added to the squared length of a query or key, before its root divides that query or key."""


@dataclass(frozen=True)
class Variant:
    """Says what has a decay of its own: heads or channels.

    Attributes:
        name: Its key in `VARIANTS`.
        per_channel: Whether each key channel of a head has a decay, as in Kimi Delta Attention, or only each head, as
            in Gated DeltaNet.
    """

    name: str
    per_channel: bool


VARIANTS = {variant.name: variant for variant in (Variant("head", False), Variant("channel", True))}
"""Every variant by name, the likely ones first."""


def compute(
    variant: Variant,
    normalised: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` for checked arguments.

    Args:
        variant: The variant.
        normalised: Whether q and k are divided by their lengths.
        q: ``(batch, tokens, key heads, key channels)``, floating.
        k: As *q*.
        v: ``(batch, tokens, heads, value channels)``, floating.
        g: ``(batch, tokens, heads)``, or ``(batch, tokens, heads, key channels)``, floating.
        beta: ``(batch, tokens, heads)``, floating.
        initial_state: ``(batch, heads, key channels, value channels)``, floating; ``None`` for zeros.

    Returns:
        The result, of the shape of *v* and the dtype of *q*; and the final state, of the shape of *initial_state* and
        in `working_dtype`.
    """
    wide = working_dtype(q, k, v, g, beta, initial_state)
    dtype, (batch, _, key_heads, channels), heads = q.dtype, k.shape, v.shape[2]
    q, k, v, decay, beta = (x.to(wide) for x in (q, k, v, g, beta))
    if normalised:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    q, k = (x.repeat_interleave(heads // key_heads, 2).unsqueeze(-1) for x in (q * channels**-0.5, k))
    v, beta = v.unsqueeze(-2), beta[..., None, None]
    decay = (decay if variant.per_channel else decay.unsqueeze(-1)).unsqueeze(-1).exp()
    state = v.new_zeros(batch, heads, channels, v.shape[-1])
    state = state if initial_state is None else state + initial_state
    results = [torch.zeros_like(v[:, :0, :, 0])]
    for q_t, k_t, v_t, decay_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, decay, beta)), strict=True):
        state = state * decay_t
        state = state + k_t * beta_t * (v_t - (state * k_t).sum(-2, keepdim=True))
        results.append((state * q_t).sum(-2).unsqueeze(1))
    return torch.cat(results, 1).to(dtype), state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    variant: str = "head",
    normalised: bool = False,
    compute: Callable[..., tuple[Tensor, Tensor]] = compute,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: the state of each head decays, is corrected by a token's key and value, and is read.

    For each token, ``S ← e^g S``, then ``S ← S + β k (v - kᵀS)``, and the result is ``qᵀS / √channels``. It is computed
    in float32, or in float64 if an argument is in float64.

    Args:
        q: ``(batch, tokens, key heads, key channels)``, floating, of any strides.
        k: As *q*.
        v: ``(batch, tokens, heads, value channels)``, floating. Each key head serves ``heads / key heads`` heads, side
            by side.
        g: The logarithms of the decays, finite and none above 0: ``(batch, tokens, heads)`` if the variant is
            ``"head"``, or ``(batch, tokens, heads, key channels)`` if it is ``"channel"``, floating.
        beta: The strengths of the corrections: ``(batch, tokens, heads)``, floating.
        initial_state: ``(batch, heads, key channels, value channels)``, floating; ``None`` for zeros.
        variant: A key of `VARIANTS`.
        normalised: Whether q and k are first divided by their lengths, the root of the sum of their squares and `EPS`.
        compute: A backend's function, called with the row of `VARIANTS` and the checked arguments.

    Returns:
        The result, ``(batch, tokens, heads, value channels)`` in the dtype of *q*; and the final state, of the shape of
        *initial_state* and in the dtype of the computation.

    Raises:
        ValueError: If the variant is unknown, or a shape does not fit.
    """
    row = check(q, k, v, g, beta, initial_state, variant)
    return compute(row, normalised, q, k, v, g, beta, initial_state)


def check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, variant: str
) -> Variant:
    """Return the row of *variant*, or raise the `ValueError` that says what does not fit."""
    row = VARIANTS.get(variant)
    if row is None:
        raise ValueError(f"unknown variant of the gated delta rule {variant!r}; known: {', '.join(VARIANTS)}")
    if q.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q and v have shapes {tuple(q.shape)} and {tuple(v.shape)}; (batch, tokens, heads, channels) is expected"
        )
    batch, tokens, heads, values = v.shape
    key_heads, channels = q.shape[2:]
    if not key_heads or heads % key_heads:
        raise ValueError(f"v has {heads} heads, and q {key_heads}: a multiple is expected")
    state = (batch, heads, channels, values)
    for name, found, expected in (
        ("q", q, (batch, tokens, key_heads, channels)),
        ("k", k, (batch, tokens, key_heads, channels)),
        ("g", g, (batch, tokens, heads, channels) if row.per_channel else (batch, tokens, heads)),
        ("beta", beta, (batch, tokens, heads)),
        ("initial_state", initial_state, state),
    ):
        if found is not None and found.shape != expected:
            raise ValueError(f"{name} has shape {tuple(found.shape)}; {expected} is expected")
    return row
