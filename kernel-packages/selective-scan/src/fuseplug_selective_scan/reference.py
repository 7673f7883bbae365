"""The selective scan in plain PyTorch, one token after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_backends.dtypes import working_dtype

__all__ = ["compute", "result_dtype", "selective_scan", "working_dtype"]


def compute(
    delta_softplus: bool,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` of checked arguments.

    Args:
        delta_softplus: Whether dt goes through a softplus, once *delta_bias* is added.
        x: ``(batch, channels, tokens)``, floating.
        dt: As *x*.
        A: ``(channels, states)``, floating.
        B: ``(batch, states, tokens)``, floating.
        C: As *B*.
        D: ``(channels,)``, floating, or ``None``.
        z: As *x*, or ``None``.
        delta_bias: ``(channels,)``, floating, or ``None``.
        initial_state: ``(batch, channels, states)``, floating; ``None`` for zeros.

    Returns:
        The result, shaped as *x*, in `result_dtype`; and the last state, shaped as *initial_state*, in `working_dtype`.
    """
    dtype, wide = result_dtype(x, D, z), working_dtype(x, dt, A, B, C, D, z, delta_bias, initial_state)
    x, dt, A, B, C = (tensor.to(wide) for tensor in (x, dt, A, B, C))
    dt = dt if delta_bias is None else dt + delta_bias.unsqueeze(-1)
    dt = functional.softplus(dt) if delta_softplus else dt
    state, results = x.new_zeros(*x.shape[:2], A.shape[1]), [torch.zeros_like(x[..., :0])]
    state = state if initial_state is None else state + initial_state
    for x_t, dt_t, B_t, C_t in zip(*(tensor.unbind(-1) for tensor in (x, dt, B, C)), strict=True):
        dt_t = dt_t.unsqueeze(-1)
        state = state * (dt_t * A).exp() + dt_t * x_t.unsqueeze(-1) * B_t.unsqueeze(1)
        results.append((state * C_t.unsqueeze(1)).sum(-1, keepdim=True))
    y = torch.cat(results, -1)
    y = y if D is None else y + x * D.unsqueeze(-1)
    y = y if z is None else y * functional.silu(z.to(wide))
    return y.to(dtype), state


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    delta_softplus: bool = False,
    compute: Callable[..., tuple[Tensor, Tensor]] = compute,
) -> tuple[Tensor, Tensor]:
    """The selective scan of Mamba (S6; Gu & Dao 2023, arXiv:2312.00752, section 3.2), with its skip and its gate.

    Each channel has a few states. For each token, ``h ← exp(dt A) h + dt x B``, and the result is
    ``(h C + D x) silu(z)``. The computation is in float32, or in float64 if an argument is.

    Args:
        x: ``(batch, channels, tokens)``, floating, of any strides.
        dt: The size of each step, before *delta_bias* and the softplus: as *x*.
        A: ``(channels, states)``, floating; negative in models.
        B: ``(batch, states, tokens)``, floating.
        C: As *B*.
        D: ``(channels,)``, floating; ``None`` for no skip.
        z: As *x*; ``None`` for no gate.
        delta_bias: ``(channels,)``, floating; ``None`` for no bias.
        initial_state: The states before the first token, ``(batch, channels, states)``, floating; ``None`` for zeros.
        delta_softplus: Whether a step is the softplus of the sum of *dt* and *delta_bias*, or the sum itself.
        compute: The function that computes the result of the checked arguments; a backend passes its own.

    Returns:
        The result, shaped as *x*, in the dtype to which x, D and z promote; and the last state, shaped as
        *initial_state*, in the dtype of the computation.

    Raises:
        ValueError: If a shape does not fit.
    """
    check(x, dt, A, B, C, D, z, delta_bias, initial_state)
    return compute(delta_softplus, x, dt, A, B, C, D, z, delta_bias, initial_state)


def check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    """Raise a `ValueError` that names the first shape that does not fit."""
    if x.dim() != 3 or A.dim() != 2:
        raise ValueError(
            f"x and A have shapes {tuple(x.shape)} and {tuple(A.shape)}; (batch, channels, tokens) and "
            "(channels, states) are expected"
        )
    batch, channels, tokens = x.shape
    states = A.shape[1]
    for name, tensor, expected in (
        ("dt", dt, (batch, channels, tokens)),
        ("A", A, (channels, states)),
        ("B", B, (batch, states, tokens)),
        ("C", C, (batch, states, tokens)),
        ("D", D, (channels,)),
        ("z", z, (batch, channels, tokens)),
        ("delta_bias", delta_bias, (channels,)),
        ("initial_state", initial_state, (batch, channels, states)),
    ):
        if tensor is not None and tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {expected} is expected")


def result_dtype(x: Tensor, D: Tensor | None, z: Tensor | None) -> torch.dtype:
    """The dtype of the result, to which *x*, *D* and *z* promote: a skip in float32 widens it."""
    dtypes = (tensor.dtype for tensor in (D, z) if tensor is not None)
    return functools.reduce(torch.promote_types, dtypes, x.dtype)
