"""Gradients for operations that have none: computed from a formula, run again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..differentiating import differentiated_again, vjp


def recomputed(op: Callable[..., Tensor], formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make *op* differentiable.

    Many operations of torch_npu have no derivative, and most of those do not say so: every gradient behind them is
    ``None``. Here the forward is *op*, of which nothing is kept but its arguments; the backward runs *formula* on them
    and differentiates that.

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
        records = torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in arguments)
        if not records:
            return op(*arguments)
        if torch.compiler.is_compiling():
            return formula(*arguments)
        result: Tensor = Recomputed.apply(*arguments)  # type: ignore[no-untyped-call]
        return result

    return differentiable
