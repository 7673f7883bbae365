"""When gradients are recorded, and those of a formula of plain PyTorch, in the backward of what computes it faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def recording(*tensors: Tensor | None) -> bool:
    """Whether a gradient of one of *tensors* is recorded, here and now."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def differentiated_again() -> bool:
    """Whether the backward that asks is run with ``create_graph=True``, so that its own derivative may be wanted.

    Gradients are recorded in such a backward, and in no other.
    """
    return torch.is_grad_enabled()


def vjp(
    formula: Callable[..., Any],
    arguments: Sequence[Any],
    needs: Sequence[bool],
    grads: Sequence[Tensor],
    *,
    create_graph: bool = True,
) -> list[Tensor | None]:
    """Run *formula* and differentiate it.

    What has no second derivative of its own gets it from here: a backward that is `differentiated_again` runs this.

    Args:
        formula: Takes *arguments*, and gives one tensor or several.
        arguments: Tensors and others.
        needs: For each argument, whether its gradient is wanted.
        grads: The gradient of each result.
        create_graph: Whether the gradients can be differentiated again.

    Returns:
        For each argument its gradient; ``None`` for one that is not wanted.
    """
    with torch.enable_grad():
        # Views, because one tensor may be two arguments, or be what another was computed from: each has its own.
        views = [_view(each, needed) for each, needed in zip(arguments, needs, strict=True)]
        wanted = [view for view, needed in zip(views, needs, strict=True) if needed]
        found = iter(torch.autograd.grad(formula(*views), wanted, grads, create_graph=create_graph))
    return [next(found) if needed else None for needed in needs]


def _view(argument: Any, needed: bool) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.view_as(argument) if argument.requires_grad else argument.detach().requires_grad_(needed)
