"""A mixture of experts step by step, each with its own derivative, for modules whose gate or norm is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuseplug_backends.triton import differentiable

from ... import reference
from ...reference import Experts, Projection
from ..counts_on_host import HostCounts, host_counts_of
from .combine import combine, combine_backward
from .project import project
from .routing import counts, sort
from .weight_gradient import bias_gradient, weight_gradient


def compute(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """`fuseplug_moe.reference.compute` for the same arguments, but *index* must be contiguous."""
    route = sort(index, experts.number)
    host_counts = host_counts_of(experts, route, lambda route: counts(route, index, experts.number))
    x_rows, k = x.to(experts.dtype).contiguous(), index.shape[1]

    def linear(rows: Tensor, projection: Projection, bias: Tensor | None, k: int, by_slot: bool) -> Tensor:
        form = _Form(experts.number, experts.transposed, k, by_slot, host_counts)
        result: Tensor = _linear(form, route, index, rows, bias, *reference.tensors_of(projection))
        return result

    up = None if experts.up is None else linear(x_rows, experts.up, None, k, False)
    inner = reference.gated(experts, linear(x_rows, experts.gate_up, experts.gate_up_bias, k, False), up)
    rows = inner.to(reference.first(experts.down).dtype).contiguous()
    out = linear(rows, experts.down, experts.down_bias, 0, True)
    if experts.post is not None:
        out = experts.post(out).contiguous()
    result: Tensor = _weighed((experts.number, x.dtype), out, index, weights)
    return result


def by_matrix(stacked: Tensor, matrices: Sequence[Tensor], needs: Sequence[bool]) -> Sequence[Tensor | None]:
    """The wanted gradients of *matrices*, views of *stacked*, which holds the gradients of all of them."""
    if not matrices:
        return []
    gradients = (stacked,) if matrices[0].dim() == 3 else stacked.unbind()
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


def of_busy(
    gradients: Sequence[Tensor | None], host_counts: HostCounts | None, route: Tensor
) -> Sequence[Tensor | None]:
    """*gradients*, one or more for each expert, with ``None`` for experts without tokens."""
    if host_counts is None:
        return gradients
    busy = host_counts.positive(route)
    return [gradient if busy[at % len(busy)] else None for at, gradient in enumerate(gradients)]


class _Form(NamedTuple):
    """How rows are projected.

    Attributes:
        experts: The number of experts.
        transposed: Whether matrices are ``(in, out)``.
        k: How many slots a token has, if rows are tokens; 0 if rows are in the order of the experts.
        by_slot: Whether the result is in the order of the slots, rather than of the experts.
        host_counts: The number of rows of each expert, if the matrices of idle experts are to have no gradient.
    """

    experts: int
    transposed: bool
    k: int
    by_slot: bool
    host_counts: HostCounts | None


def _project(
    form: _Form, _: Sequence[bool], route: Tensor, index: Tensor, rows: Tensor, bias: Tensor | None, *matrices: Tensor
) -> tuple[Tensor, tuple[()]]:
    del index
    # Functions that are not ours see the rows of experts elsewhere, so these rows are zero.
    return project(rows, route, matrices, (), bias, form.experts, form.transposed, form.k, form.by_slot, True), ()


def _project_backward(
    form: _Form,
    needs: Sequence[bool],
    grad: Tensor,
    route: Tensor,
    index: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    *matrices: Tensor,
) -> list[Tensor | None]:
    del bias
    _, _, needs_rows, needs_bias, *needs_matrices = needs
    gradients: list[Tensor | None] = []
    grad = grad.contiguous()
    slots, by_slot = index.numel(), int(form.by_slot)  # rows in the order of the slots are tokens with one slot
    if needs_rows:
        of_rows = project(
            grad, route, matrices, (), None, form.experts, not form.transposed, by_slot, form.k > 0, form.k == 0
        )
        gradients.append(combine(of_rows, index, None, form.experts, rows.dtype) if form.k else of_rows)
    if needs_bias:
        gradients.append(bias_gradient(grad, None, route, slots, form.experts, by_slot))
    if any(needs_matrices):
        sides = (rows, grad, route, slots, form.experts, form.k, by_slot)
        if not form.transposed:
            sides = (grad, rows, route, slots, form.experts, by_slot, form.k)
        of_matrices = of_busy(by_matrix(weight_gradient(*sides), matrices, needs_matrices), form.host_counts, route)
        gradients += [gradient for gradient, need in zip(of_matrices, needs_matrices, strict=True) if need]
    return gradients


def _projected(
    form: _Form, route: Tensor, index: Tensor, rows: Tensor, bias: Tensor | None, *matrices: Tensor
) -> Tensor:
    """The formula of `_project`, in operations that can be differentiated again."""
    del route
    order = reference.sort(index, form.experts)
    rows = rows[order.slots // form.k] if form.k else rows
    skip = form.host_counts is not None
    out = reference.linear(rows, reference.projection_of(matrices), order, bias, transposed=form.transposed, skip=skip)
    out = out.masked_fill((index.reshape(-1)[order.slots] >= form.experts)[:, None], 0)
    return out[order.rows] if form.by_slot else out


_linear = differentiable(_project, _project_backward, _projected)


def _combine(
    constants: tuple[int, torch.dtype], _: Sequence[bool], rows: Tensor, index: Tensor, weights: Tensor
) -> tuple[Tensor, tuple[()]]:
    return combine(rows, index, weights.contiguous(), *constants), ()


def _combine_backward(
    constants: tuple[int, torch.dtype],
    needs: Sequence[bool],
    grad: Tensor,
    rows: Tensor,
    index: Tensor,
    weights: Tensor,
) -> list[Tensor]:
    of_rows, of_weights = combine_backward(grad.contiguous(), rows, index, weights.contiguous(), constants[0])
    return ([of_rows] if needs[0] else []) + ([of_weights] if needs[2] else [])


def _combined(constants: tuple[int, torch.dtype], rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The formula of `_combine`, in operations that can be differentiated again."""
    experts, dtype = constants
    elsewhere = index >= experts
    slots = rows.view(*index.shape, -1).masked_fill(elsewhere[..., None], 0)
    return reference.weigh(slots, weights.masked_fill(elsewhere, 0)).to(dtype)


_weighed = differentiable(_combine, _combine_backward, _combined)
