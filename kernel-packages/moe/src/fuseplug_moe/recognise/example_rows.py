"""Which experts the rows of examples go to: if a block routes the rows, no rounding decides where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .small_copies import SmallCopies

_CLEAR = 0.1
_CLEAR_PROBABILITY = 0.01
_OUT_OF_REACH = -20.0
_MOST_TRIES = 100


def decided(
    small: SmallCopies,
    linear: Any,
    top_k: int,
    count: int,
    dtype: torch.dtype,
    correct: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Rows ``(2, count / 2, hidden)`` for a router, which gets a new weight.

    The *top_k* experts of each row are well ahead of the others, and no row goes to the expert in the middle.

    Args:
        small: The source of random numbers.
        linear: The layer that gives the logits.
        top_k: How many experts a row goes to.
        count: The number of rows.
        dtype: The dtype of the rows.
        correct: Changes the probabilities before the largest are chosen.

    Raises:
        ValueError: If the router routes too few rows clearly.
    """
    weight = small.normal(*linear.weight.shape, scale=2.0 * linear.weight.shape[1] ** -0.5)
    experts = len(weight)
    # The first column of x is constant: it puts one expert out of reach, and no other expert's logit depends on it.
    weight[:, 0] = 0.0
    if experts > top_k:
        weight[experts // 2, 0] = _OUT_OF_REACH
    weight = weight.to(linear.weight.dtype)
    linear.weight = nn.Parameter(weight)
    clear: list[Tensor] = []
    for _ in range(_MOST_TRIES):
        rows = small.normal(4 * count, weight.shape[1])
        rows[:, 0] = 1.0
        rows = rows.to(dtype)
        if experts > top_k:
            logits = rows.double() @ weight.double().t()
            scores = logits if correct is None else correct(logits.softmax(1)).detach()
            best, chosen = scores.topk(top_k + 1)
            ahead = best[:, top_k - 1] - best[:, top_k] > (_CLEAR if correct is None else _CLEAR_PROBABILITY)
            rows = rows[ahead & (chosen[:, :top_k] != experts // 2).all(1)]
        clear.append(rows)
        if sum(map(len, clear)) >= count:
            break
    else:
        raise ValueError(f"a router of shape {list(weight.shape)} gives hardly any random row a clear choice")
    return torch.cat(clear)[: count // 2 * 2].view(2, -1, weight.shape[1])


def routing(tokens: int, experts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two experts for each token, if there are enough; the middle expert is idle.

    Returns:
        Indices ``(tokens, 2)`` int64, and weights ``(tokens, 2)`` float32.
    """
    idle = experts // 2
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float32, device="cpu") + 0.1
    chosen = scores.clone()
    if experts > 1:
        chosen[:, idle] = 0
    index = chosen.topk(min(2, max(1, experts - 1)), sorted=False)[1]
    return index, scores.gather(1, index)
