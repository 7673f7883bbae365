"""What the recurrence of Mamba-2 computes, in plain PyTorch: one token after the other."""

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
    """How the size of a step is made of dt and its bias.

    Attributes:
        softplus: Whether their sum goes through a softplus.
        least: The smallest step.
        largest: The largest step.
    """

    softplus: bool
    least: float
    largest: float

    def size(self, dt: Tensor) -> Tensor:
        """The size of the step of each of *dt*, the sums with the bias."""
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
    """`ssd` for arguments that were checked.

    Args:
        step: How the size of a step is made.
        x: ``(batch, tokens, heads, width)``, floating.
        dt: ``(batch, tokens, heads)``, floating.
        A: ``(heads,)``, floating.
        B: ``(batch, tokens, groups, states)``, floating.
        C: As *B*.
        D: ``(heads,)``, floating, or ``None``.
        dt_bias: ``(heads,)``, floating, or ``None``.
        initial_states: ``(batch, heads, width, states)``, floating, or ``None``.

    Returns:
        The result, as *x*, and the last states, ``(batch, heads, width, states)``, both in `working_dtype`.
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
    Some heads share B and C: a group. It is computed in float32, or in float64 if an argument has that.

    Args:
        x: ``(batch, tokens, heads, width)``, floating, of any strides.
        dt: The size of each step, before *dt_bias*, the softplus and *dt_limit*: ``(batch, tokens, heads)``, floating.
        A: ``(heads,)``, floating; in models below 0.
        B: ``(batch, tokens, groups, states)``, floating; the number of heads is a multiple of that of groups.
        C: As *B*.
        D: ``(heads,)``, floating; ``None`` for no skip.
        dt_bias: ``(heads,)``, floating; ``None`` for none.
        initial_states: The states before the first token: ``(batch, heads, width, states)``, floating; ``None`` for
            zeros.
        dt_softplus: Whether a step is the softplus of *dt* and *dt_bias*, or their sum.
        dt_limit: The smallest and the largest step.
        compute: What is given the arguments once they are checked: that of a backend.

    Returns:
        The result, as *x*; and the last states, ``(batch, heads, width, states)``. Both have the dtype in which it is
        computed.

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
    """Raise the `ValueError` that says what does not fit."""
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
