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
    """Run *formula* outside autocast, and differentiate it.

    What has no second derivative of its own gets it from here: a backward that is `differentiated_again` runs this.
    A penalty on gradients is often computed under autocast, where the forward was not.

    Args:
        formula: Takes *arguments*, and gives one tensor or several.
        arguments: Tensors and others.
        needs: For each argument, whether its gradient is wanted.
        grads: The gradient of each result.
        create_graph: Whether the gradients can be differentiated again.

    Returns:
        For each argument its gradient; ``None`` for one that is not wanted.
    """
    with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):
        # Views, because one tensor may be two arguments, or be what another was computed from: each has its own.
        views = [_view(each, needed) for each, needed in zip(arguments, needs, strict=True)]
        wanted = [view for view, needed in zip(views, needs, strict=True) if needed]
        found = iter(torch.autograd.grad(formula(*views), wanted, grads, create_graph=create_graph))
    return [next(found) if needed else None for needed in needs]


def _view(argument: Any, needed: bool) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.view_as(argument) if argument.requires_grad else argument.detach().requires_grad_(needed)


def recomputed(op: Callable[..., Tensor], formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make *op* differentiable.

    Many operations of torch_npu have no derivative, and most of those do not say so: every gradient behind them is
    ``None``. A launch of a Triton kernel has none either, until its author writes one. Here the forward is *op*, of
    which nothing is kept but its arguments; the backward runs *formula* on them and differentiates that.

    Args:
        op: Takes tensors and other arguments, positionally, and gives one tensor.
        formula: The same in operations that have derivatives.

    Returns:
        A function with the arguments of *op*. Where no gradient is wanted it is *op*; inside ``torch.compile`` where
        one is, it is *formula*, for the compiler to fuse.
    """

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Tensor:
            ctx.save_for_backward(*(each for each in arguments if isinstance(each, Tensor)))
            ctx.others = [None if isinstance(each, Tensor) else (each,) for each in arguments]
            return op(*arguments)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            saved = iter(ctx.saved_tensors)
            arguments = [next(saved) if other is None else other[0] for other in ctx.others]
            return tuple(vjp(formula, arguments, ctx.needs_input_grad, (grad,), create_graph=differentiated_again()))

    def differentiable(*arguments: Any) -> Tensor:
        if not recording(*(each for each in arguments if isinstance(each, Tensor))):
            return op(*arguments)
        if torch.compiler.is_compiling():
            return formula(*arguments)
        result: Tensor = Recomputed.apply(*arguments)  # type: ignore[no-untyped-call]
        return result

    return differentiable
