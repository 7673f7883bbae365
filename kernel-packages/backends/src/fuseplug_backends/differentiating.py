"""Recording gradients, differentiating a formula, and making faster computations of a formula differentiable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tracing import transparent

__all__ = ["differentiable", "differentiable_linear", "differentiated_again", "recomputed", "recording", "vjp"]


def recording(*tensors: Tensor | None) -> bool:
    """Whether a gradient of one of *tensors* is recorded, here and now."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def differentiated_again() -> bool:
    """Whether the calling backward runs with ``create_graph=True``, so that its own derivative may be wanted.

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

    A kernel without a second derivative of its own gets it here: a backward that is `differentiated_again` calls this.
    A penalty on gradients is often computed under autocast, although the forward was not.

    Args:
        formula: Takes *arguments*, and returns one tensor or several.
        arguments: Tensors and other values.
        needs: For each argument, whether its gradient is wanted.
        grads: The gradient of each result.
        create_graph: Whether the gradients can be differentiated again.

    Returns:
        For each argument, its gradient; ``None`` if the gradient is not wanted, or *formula* does not use the argument.
    """
    with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):
        # Views give each argument its own gradient, even if one tensor is two arguments or another is computed from it.
        views = [_view(argument, needed) for argument, needed in zip(arguments, needs, strict=True)]
        wanted = [view for view, needed in zip(views, needs, strict=True) if needed]
        results = formula(*views)
        gradients = iter(torch.autograd.grad(results, wanted, grads, create_graph=create_graph, allow_unused=True))
    return [next(gradients) if needed else None for needed in needs]


def _view(argument: Any, needed: bool) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.view_as(argument) if argument.requires_grad else argument.detach().requires_grad_(needed)


_Function = Callable[..., Any]


class _Rule(NamedTuple):
    """The arguments of `differentiable`, or of `differentiable_linear`."""

    forward: _Function
    backward: _Function | None
    formula: _Function
    serves: Callable[..., bool]


def differentiable(
    forward: _Function, backward: _Function | None, formula: _Function, serves: Callable[..., bool] = transparent
) -> _Function:
    """Make a faster computation of *formula* differentiable, any number of times.

    ``torch.compile`` traces the function if it can trace *forward* and *backward*.

    Args:
        forward: ``forward(form, needs, *tensors)``. *needs* says for each tensor whether its gradient is wanted, and is
            empty if no gradient is recorded. Returns the result, a tensor or a tuple of tensors, none of which is an
            argument or a view; and the tensors to keep for the backward besides the arguments.
        backward: ``backward(form, needs, *grads, *kept, *tensors)``. Takes the gradient of each result, then the
            tensors that *forward* kept, then the arguments. Returns the gradients of the tensors that need one, in
            their order; ``None`` for a tensor that is to have no gradient. Without *backward*, *formula* is
            differentiated.
        formula: ``formula(form, *tensors)``. Computes the result in operations of torch. It is run and differentiated
            in a backward that is `differentiated_again`, or for which *serves* is false.
        serves: ``serves(*grads, *tensors)``. Tells whether *backward* can be called for these, here and now.

    Returns:
        ``function(form, *tensors)``. *form* holds everything that is not a tensor; a tensor may be ``None``. All
        tensors are kept for the backward, which raises `RuntimeError` if one was written into.
    """
    rule = _Rule(forward, backward, formula, serves)

    def function(form: Any, *tensors: Tensor | None) -> Any:
        if recording(*tensors):
            return _Recorded.apply(rule, form, *tensors)  # type: ignore[no-untyped-call]
        return forward(form, (), *tensors)[0]

    return function


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: _Rule, form: Any, *tensors: Tensor | None) -> Any:
        ctx.rule, ctx.form = rule, form
        result, kept = rule.forward(form, ctx.needs_input_grad[2:], *tensors)
        ctx.save_for_backward(*kept, *tensors)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rule, form, needs = ctx.rule, ctx.form, ctx.needs_input_grad[2:]
        # Read once: activation checkpointing computes them when they are read, and then forgets them.
        saved = ctx.saved_tensors
        tensors = saved[len(saved) - len(needs) :]
        if rule.backward is None or differentiated_again() or not rule.serves(*grads, *tensors):
            formula = functools.partial(rule.formula, form)
            return (None, None, *vjp(formula, tensors, needs, grads, create_graph=differentiated_again()))
        gradients = iter(rule.backward(form, needs, *grads, *saved))
        return (None, None, *[next(gradients) if need else None for need in needs])


def differentiable_linear(
    forward: _Function, backward: _Function, formula: _Function, serves: Callable[..., bool] = transparent
) -> Callable[..., Sequence[Tensor]]:
    """`differentiable` for a function that is linear in some tensors, xs. Only the others, the tables, are kept.

    If a table needs a gradient, xs are kept, too. A result that nobody used has no gradient, and neither has its x.

    Args:
        forward: ``forward(form, xs, tables)``. Returns a result for each of *xs*, linear in it; no result is a view.
        backward: ``backward(form, grads, tables, dtypes)``. Takes the gradient of each result, or ``None`` if the
            gradient of its x is not wanted, and the dtype of each x. Returns the wanted gradients, in their order.
        formula: ``formula(form, xs, tables)``. Computes the results in operations of torch. It gives the gradients of
            tables, and every gradient in a backward that is `differentiated_again`, or for which *serves* is false.
        serves: ``serves(*grads, *tables)``. Tells whether *backward* can be called for these, here and now.

    Returns:
        ``function(form, xs, tables)``. *form* holds everything that is not a tensor.
    """
    rule = _Rule(forward, backward, formula, serves)

    def function(form: Any, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> Any:
        if recording(*xs, *tables):
            return _RecordedLinear.apply(rule, form, len(xs), *xs, *tables)  # type: ignore[no-untyped-call]
        return forward(form, xs, tables)

    return function


class _RecordedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: _Rule, form: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        xs, tables = tensors[:number], tensors[number:]
        results = tuple(rule.forward(form, xs, tables))
        ctx.rule, ctx.form = rule, form
        ctx.shapes, ctx.dtypes = [y.shape for y in results], [x.dtype for x in xs]
        needs = ctx.needs_input_grad[3:]
        if any(needs[number:]):
            ctx.save_for_backward(*tensors)
        else:
            ctx.save_for_backward(*tables)
            if not all(needs[:number]):
                ctx.mark_non_differentiable(*[y for y, need in zip(results, needs[:number], strict=True) if not need])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        number = len(grads)
        needs = list(ctx.needs_input_grad[3:])
        needs[:number] = [need and grad is not None for need, grad in zip(needs, grads, strict=False)]
        # Read once: activation checkpointing computes them when they are read, and then forgets them.
        saved = ctx.saved_tensors
        tables = saved[len(saved) - len(needs) + number :]
        xs = saved[: len(saved) - len(tables)]
        if differentiated_again() or not ctx.rule.serves(*grads, *tables):
            return None, None, None, *_by_formula(ctx, needs, grads, xs, tables)
        gradients: list[Tensor | None] = [None] * len(needs)
        if any(needs[:number]):
            wanted = [grad if need else None for grad, need in zip(grads, needs, strict=False)]
            launched = iter(ctx.rule.backward(ctx.form, wanted, tables, ctx.dtypes))
            gradients[:number] = [next(launched) if need else None for need in needs[:number]]
        if any(needs[number:]):
            of_tables = (*(False for _ in grads), *needs[number:])
            gradients[number:] = _by_formula(ctx, of_tables, grads, xs, tables)[number:]
        return None, None, None, *gradients


def _by_formula(
    ctx: Any, needs: Sequence[bool], grads: Sequence[Tensor | None], xs: Sequence[Tensor], tables: Sequence[Tensor]
) -> list[Tensor | None]:
    # The gradient of a linear function does not depend on the values of xs.
    xs = xs or [tables[0].new_zeros(shape, dtype=dtype) for shape, dtype in zip(ctx.shapes, ctx.dtypes, strict=True)]

    def formula(*tensors: Tensor) -> list[Tensor]:
        results = ctx.rule.formula(ctx.form, tensors[: len(xs)], tensors[len(xs) :])
        return [result for result, grad in zip(results, grads, strict=True) if grad is not None]

    # A backward may give none, and autograd calls the next one all the same.
    if not (upstream := [grad for grad in grads if grad is not None]):
        return [None for _ in needs]
    return vjp(formula, (*xs, *tables), needs, upstream, create_graph=differentiated_again())


def recomputed(op: Callable[..., Tensor], formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make *op* differentiable.

    Many operations of torch_npu have no derivative, and most of these do not say so: every gradient behind them is
    ``None``. The launch of a Triton kernel has no derivative either, until its author writes one. Here the forward is
    *op*, and only its arguments are kept. The backward runs *formula* on the arguments and differentiates it.

    Args:
        op: Takes tensors and other arguments, positionally, and returns one tensor.
        formula: The same computation, in operations that have derivatives.

    Returns:
        A function with the arguments of *op*. If no gradient is wanted, it calls *op*. If one is wanted inside
        ``torch.compile``, it calls *formula*, for the compiler to fuse.
    """

    def forward(others: _Others, _needs: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, tuple[()]]:
        return op(*_arguments(others, tensors)), ()

    def by_formula(others: _Others, *tensors: Tensor) -> Tensor:
        return formula(*_arguments(others, tensors))

    recorded = differentiable(forward, None, by_formula)

    def function(*arguments: Any) -> Tensor:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if not recording(*tensors):
            return op(*arguments)
        if torch.compiler.is_compiling():
            return formula(*arguments)
        others = [None if isinstance(argument, Tensor) else (argument,) for argument in arguments]
        result: Tensor = recorded(others, *tensors)
        return result

    return function


_Others = Sequence[tuple[Any] | None]
"""The arguments that are not tensors, each in a tuple, with ``None`` in place of each tensor."""


def _arguments(others: _Others, tensors: Iterable[Tensor]) -> list[Any]:
    rest = iter(tensors)
    return [next(rest) if other is None else other[0] for other in others]
