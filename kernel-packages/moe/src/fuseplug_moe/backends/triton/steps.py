"""A mixture of experts step by step, for gates and norms that are called: each step has a derivative of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug_backends.triton import differentiated_again, recording, vjp

from ... import grouped_linear, reference
from ...reference import Experts, Projection
from ..counts_on_host import HostCounts
from .combine import combine, combine_backward
from .project import project
from .routing import counts, sort
from .weight_gradient import bias_gradient, weight_gradient


def compute(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """`fuseplug_moe.reference.compute`, of the same arguments but for an *index* that is contiguous."""
    route = sort(index, experts.number)
    host_counts = host_counts_of(experts, route, index)
    x_rows, k = x.to(experts.dtype).contiguous(), index.shape[1]

    def linear(rows: Tensor, projection: Projection, bias: Tensor | None, k: int, by_slot: bool) -> Tensor:
        how = _How(experts.number, experts.transposed, k, by_slot)
        each = (projection,) if isinstance(projection, Tensor) else tuple(projection)
        if not recording(rows, bias, *each):
            return _project(how, rows, route, bias, each)
        result: Tensor = _Linear.apply(how, host_counts, route, index, rows, bias, *each)
        return result

    up = None if experts.up is None else linear(x_rows, experts.up, None, k, False)
    inner = reference.gated(experts, linear(x_rows, experts.gate_up, experts.gate_up_bias, k, False), up)
    rows = inner.to(reference.first(experts.down).dtype).contiguous()
    out = linear(rows, experts.down, experts.down_bias, 0, True)
    if experts.post is not None:
        out = experts.post(out).contiguous()
    if not recording(out, weights):
        unrecorded: Tensor = combine(out, index, weights.contiguous(), experts.number, x.dtype)
        return unrecorded
    result: Tensor = _Combine.apply(out, index, weights, experts.number, x.dtype)
    return result


def host_counts_of(experts: Experts, route: Tensor, index: Tensor) -> HostCounts | None:
    """What a backward must know on the host: which experts get no gradient at all."""
    listed = [each for each in (experts.gate_up, experts.up, experts.down) if not isinstance(each, Tensor | None)]
    if experts.idle == "zero" or not any(recording(*each) for each in listed):
        return None
    return HostCounts(counts(route, index, experts.number))


def by_matrix(stacked: Tensor, matrices: Sequence[Tensor], needs: Sequence[bool]) -> Sequence[Tensor | None]:
    """The gradients of *matrices* that are wanted, views into *stacked*, which has those of all."""
    if not matrices:
        return []
    each = (stacked,) if matrices[0].dim() == 3 else stacked.unbind()
    return [gradient if need else None for gradient, need in zip(each, needs, strict=True)]


def of_busy(gradients: Sequence[Tensor | None], host_counts: HostCounts | None) -> Sequence[Tensor | None]:
    """*gradients*, of one matrix for each expert or of several in turn, but not those of experts without tokens."""
    if host_counts is None:
        return gradients
    busy = host_counts.positive()
    return [gradient if busy[at % len(busy)] else None for at, gradient in enumerate(gradients)]


class _How(NamedTuple):
    """How rows are projected.

    Attributes:
        experts: How many there are.
        transposed: Whether matrices are ``(in, out)``.
        k: How many slots a token has if rows are tokens; 0 if they are in the order of the experts.
        by_slot: Whether the result is in the order of the slots, or in that of the experts.
    """

    experts: int
    transposed: bool
    k: int
    by_slot: bool


def _project(how: _How, rows: Tensor, route: Tensor, bias: Tensor | None, each: Sequence[Tensor]) -> Tensor:
    # The rows of experts elsewhere are seen by functions that are not ours: they are zero.
    result: Tensor = project(rows, route, each, (), bias, how.experts, how.transposed, how.k, how.by_slot, True)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: _How,
        host_counts: HostCounts | None,
        route: Tensor,
        index: Tensor,
        rows: Tensor,
        bias: Tensor | None,
        *each: Tensor,
    ) -> Tensor:
        ctx.how, ctx.host_counts = how, host_counts
        ctx.save_for_backward(route, index, rows, bias, *each)
        return _project(how, rows, route, bias, each)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        route, index, rows, bias, *each = ctx.saved_tensors
        needs_rows, needs_bias, *needs = ctx.needs_input_grad[4:]
        of_rows = of_bias = None
        of_each: Sequence[Tensor | None] = [None] * len(each)
        if differentiated_again():
            wanted = (False, False, *ctx.needs_input_grad[4:])
            found = vjp(_formula, (how, index, rows, bias, *each), wanted, (grad,))[2:]
            of_rows, of_bias, *of_each = found
            return None, None, None, None, of_rows, of_bias, *of_busy(of_each, ctx.host_counts)
        grad = grad.contiguous()
        slots, by_slot = index.numel(), int(how.by_slot)  # a row of slots is that of a token with one slot
        if needs_rows:
            of_rows = project(
                grad, route, each, (), None, how.experts, not how.transposed, by_slot, how.k > 0, how.k == 0
            )
            if how.k:
                of_rows = combine(of_rows, index, None, how.experts, rows.dtype)
        if needs_bias:
            of_bias = bias_gradient(grad, None, route, slots, how.experts, by_slot)
        if any(needs):
            sides = (rows, grad, route, slots, how.experts, how.k, by_slot)
            if not how.transposed:
                sides = (grad, rows, route, slots, how.experts, by_slot, how.k)
            of_each = by_matrix(weight_gradient(*sides), each, needs)
        return None, None, None, None, of_rows, of_bias, *of_busy(of_each, ctx.host_counts)


def _formula(how: _How, index: Tensor, rows: Tensor, bias: Tensor | None, *each: Tensor) -> Tensor:
    """What `_Linear` computes, in operations that can be differentiated again."""
    order = reference.sort(index, how.experts)
    stacked = each[0] if each[0].dim() == 3 else torch.stack(each)
    weight = stacked if how.transposed else stacked.mT
    out = grouped_linear.linear(rows[order.slots // how.k] if how.k else rows, weight, order.ends)
    if bias is not None:
        out = out + bias[order.experts]
    out = out.masked_fill((index.reshape(-1)[order.slots] >= how.experts)[:, None], 0)
    return out[order.rows] if how.by_slot else out


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, weights: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
        ctx.experts, ctx.dtype = experts, dtype
        ctx.save_for_backward(rows, index, weights)
        return combine(rows, index, weights.contiguous(), experts, dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, index, weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if differentiated_again():
            arguments = (rows, index, weights, ctx.experts, ctx.dtype)
            return tuple(vjp(_weighed, arguments, (needs[0], False, needs[2], False, False), (grad,)))
        of_rows, of_weights = combine_backward(grad.contiguous(), rows, index, weights.contiguous(), ctx.experts)
        return of_rows if needs[0] else None, None, of_weights if needs[2] else None, None, None


def _weighed(rows: Tensor, index: Tensor, weights: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """What `_Combine` computes, in operations that can be differentiated again."""
    elsewhere = index >= experts
    slots = rows.view(*index.shape, -1).masked_fill(elsewhere[..., None], 0)
    return reference.weigh(slots, weights.masked_fill(elsewhere, 0)).to(dtype)
