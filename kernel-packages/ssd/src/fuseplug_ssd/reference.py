"""The recurrence of Mamba-2 in plain PyTorch, one token after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_backends.dtypes import working_dtype

__all__ = ["Step", "check", "compute", "ssd", "working_dtype"]


class Step(NamedTuple):
    """How to compute the size of a step from dt and its bias.

    Attributes:
        softplus: Whether the sum of both goes through a softplus.
        least: The smallest step.
        largest: The largest step.
    """

    softplus: bool
    least: float
    largest: float

    def size(self, dt: Tensor) -> Tensor:
        """The size of each step; *dt* includes the bias."""
        size = functional.softplus(dt) if self.softplus else dt
        # A softplus is never below 0.
        limited = self.largest < math.inf or self.least > (0 if self.softplus else -math.inf)
        return torch.clamp(size, self.least, self.largest) if limited else size


def compute(
    step: Step,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `ssd` of checked arguments.

    Args:
        step: How to compute the size of a step.
        x: ``(batch, tokens, heads, width)``, floating.
        dt: ``(batch, tokens, heads)``, floating.
        A: ``(heads,)``, floating.
        B: ``(batch, tokens, groups, states)``, floating.
        C: As *B*.
        D: ``(heads,)``, floating, or ``None``.
        dt_bias: ``(heads,)``, floating, or ``None``.
        initial_states: ``(batch, heads, width, states)``, floating, or ``None``.

    Returns:
        The result, shaped as *x*, and the last states, ``(batch, heads, width, states)``, both in `working_dtype`.
    """
    wide = working_dtype(x, dt, A, B, C, D, dt_bias, initial_states)
    heads, per_group = x.shape[2], x.shape[2] // B.shape[2]
    x, dt, A = (tensor.to(wide) for tensor in (x, dt, A))
    B, C = (tensor.to(wide).repeat_interleave(per_group, 2, output_size=heads) for tensor in (B, C))
    dt = step.size(dt if dt_bias is None else dt + dt_bias.to(wide))
    state = x.new_zeros(*x.shape[::2], *x.shape[3:], B.shape[3]) if initial_states is None else initial_states.to(wide)
    results = [x[:, :0]]
    for x_t, dt_t, B_t, C_t in zip(*(tensor.unbind(1) for tensor in (x, dt, B, C)), strict=True):
        dt_t = dt_t[..., None, None]
        state = state * (dt_t * A[:, None, None]).exp() + dt_t * x_t.unsqueeze(3) * B_t.unsqueeze(2)
        results.append((state * C_t.unsqueeze(2)).sum(3).unsqueeze(1))
    y = torch.cat(results, 1)
    return y if D is None else y + x * D.to(wide).unsqueeze(1), state


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    compute: Callable[..., tuple[Tensor, Tensor]] = compute,
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060, section 6), with its skip.

    Each head has a matrix of states. For each token, ``h ← exp(dt A) h + dt x Bᵀ``, and the result is ``h C + D x``.
    The heads of a group share B and C. The computation is in float32, or in float64 if an argument is.

    Args:
        x: ``(batch, tokens, heads, width)``, floating, of any strides.
        dt: The size of each step, before *dt_bias*, the softplus and *dt_limit*: ``(batch, tokens, heads)``, floating.
        A: ``(heads,)``, floating; negative in models.
        B: ``(batch, tokens, groups, states)``, floating. The number of groups divides the number of heads.
        C: As *B*.
        D: ``(heads,)``, floating; ``None`` for no skip.
        dt_bias: ``(heads,)``, floating; ``None`` for no bias.
        initial_states: The states before the first token: ``(batch, heads, width, states)``, floating; ``None`` for
            zeros.
        dt_softplus: Whether a step is the softplus of the sum of *dt* and *dt_bias*, or the sum itself.
        dt_limit: The smallest and the largest step.
        compute: The function that computes the result of the checked arguments; a backend passes its own.

    Returns:
        The result, shaped as *x*; and the last states, ``(batch, heads, width, states)``. Both have the dtype of the
        computation.

    Raises:
        ValueError: If a shape does not fit.
    """
    check(x, dt, A, B, C, D, dt_bias, initial_states)
    return compute(Step(dt_softplus, *dt_limit), x, dt, A, B, C, D, dt_bias, initial_states)


def check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
) -> None:
    """Raise a `ValueError` that names the first shape that does not fit."""
    if x.dim() != 4 or B.dim() != 4:
        raise ValueError(
            f"x and B have shapes {tuple(x.shape)} and {tuple(B.shape)}; (batch, tokens, heads, width) and "
            "(batch, tokens, groups, states) are expected"
        )
    batch, tokens, heads, width = x.shape
    groups, states = B.shape[2:]
    if not groups or heads % groups:
        raise ValueError(f"{heads} heads cannot share the B and C of {groups} groups; a multiple of that is expected")
    for name, tensor, expected in (
        ("dt", dt, (batch, tokens, heads)),
        ("A", A, (heads,)),
        ("B", B, (batch, tokens, groups, states)),
        ("C", C, (batch, tokens, groups, states)),
        ("D", D, (heads,)),
        ("dt_bias", dt_bias, (heads,)),
        ("initial_states", initial_states, (batch, heads, width, states)),
    ):
        if tensor is not None and tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {expected} is expected")
