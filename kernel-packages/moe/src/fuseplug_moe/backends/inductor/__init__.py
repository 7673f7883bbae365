"""A mixture of experts for Inductor: torch's own matmul for the matrices, compiled programs between them.

The five steps, each with its own derivative: gather the rows in the order of the experts, multiply, gate, multiply
again, put the rows back in the order of the tokens and weigh them. Only experts that have rows take part. Nothing is
added atomically: the backward sums the gradients that one token gets from several experts in the same order each time.
`one_token` computes one token without gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import Compiled, differentiated_again, plain, recording, vjp, worth_compiling

from ... import reference
from ...reference import Experts, Projection
from . import one_token
from .matrix_products import grouped_matmul, matmul


def compute(experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`fuseplug_moe.reference.moe`, fused: the same arguments, result and errors.

    The result is the reference's up to rounding. Inside ``torch.compile``, ``torch.export`` and other tracers, the
    reference computes it. Ambient autocast changes nothing: the kernel computes in the dtype of the experts.
    """
    return reference.outside_autocast(_compute, experts, x, top_k_index, top_k_weights)


moe = computed_by(compute, reference.moe)


def _compute(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    # `plain` checks this, too, but torch 2.7's Dynamo cannot unpack the result of a named tuple's property.
    if torch.compiler.is_compiling():
        return by_reference(reference.compute, experts, x, index, weights)
    if not len(x) or not plain(x, index, weights, *experts.stacked):
        return by_reference(reference.compute, experts, x, index, weights)
    if len(x) == 1 and not torch.is_grad_enabled():
        decoded = one_token.compute(experts, x, index, weights)
        if decoded is not None:
            return decoded
    order = _sort(index, experts.number)
    if not order.hit:
        return by_reference(reference.compute, experts, x, index, weights)
    rows = _dispatch(x.to(experts.dtype), order)
    up = None if experts.up is None else _linear(rows, experts.up, None, order, experts)
    gate = _linear(rows, experts.gate_up, experts.gate_up_bias, order, experts)
    inner = _gated(experts, gate, up).to(reference.first(experts.down).dtype)
    out = _linear(inner, experts.down, experts.down_bias, order, experts)
    if experts.post is not None:
        out = experts.post(out)
    if order.pairs < index.numel():
        weights = weights.masked_fill(index >= experts.number, 0)
    elif recording(weights, out):
        weights = weights.clone()  # the caller may write into its weights: the originals keep a copy
    return _weighed(_unpermute(out, order), weights, x.dtype)


class _Order(NamedTuple):
    """The (token, expert) pairs whose expert is here, sorted by expert.

    Attributes:
        tokens: ``(pairs,)``, the token of each row.
        slots: ``(pairs,)``, the slot of each row, counted as in ``top_k_index.flatten()``.
        rows: ``(slots,)``, the row of each slot; ``pairs`` if the slot's expert is elsewhere.
        hit: The experts that have rows.
        sizes: The number of rows of each expert in *hit*.
        top_k_index: A copy of the indices.
        number: The number of experts.
    """

    tokens: Tensor
    slots: Tensor
    rows: Tensor
    hit: list[int]
    sizes: list[int]
    top_k_index: Tensor
    number: int

    @property
    def pairs(self) -> int:
        return len(self.slots)

    def by(self, index: Tensor) -> _Order:
        """The order of a backward's *index*, which differs from the forward's if a checkpoint routed differently."""
        return self if torch.equal(index, self.top_k_index) else _sort(index, self.number)


def _sort(index: Tensor, number: int) -> _Order:
    flat = index.reshape(-1)
    try:
        counts = torch.bincount(flat, minlength=number)[:number].tolist()
    except RuntimeError as error:
        if bool((flat < 0).any()):
            raise IndexError(f"top_k_index must not be negative; it has {int(flat.min())}") from error
        raise
    hit = [expert for expert, count in enumerate(counts) if count]
    sizes = [counts[expert] for expert in hit]
    slots = torch.argsort(flat, stable=True)[: sum(sizes)]
    rows = flat.new_full(flat.shape, len(slots), dtype=torch.long)
    rows[slots] = torch.arange(len(slots), device=flat.device)
    return _Order(slots // index.shape[1], slots, rows, hit, sizes, index.clone(), number)


def _pieces(rows: Tensor, order: _Order) -> tuple[Tensor, ...]:
    """*rows* in pieces, one for each expert that has rows."""
    pieces: tuple[Tensor, ...] = rows.split(order.sizes)  # type: ignore[no-untyped-call]
    return pieces


def _dispatch(x: Tensor, order: _Order) -> Tensor:
    """The row of each pair's token, ``(pairs, hidden)``."""
    if recording(x):
        result: Tensor = _Dispatch.apply(x, order)  # type: ignore[no-untyped-call]
        return result
    return x.index_select(0, order.tokens)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: _Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(order.top_k_index)
        return x.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        order: _Order = ctx.order.by(*ctx.saved_tensors)
        slots = _in_slots(grad, order).view(*order.top_k_index.shape, -1)
        # Torch sums half types across rows several times slower than it widens, sums and rounds them, to the same bits.
        wide = torch.promote_types(grad.dtype, torch.float32)
        return slots.to(wide).sum(1).to(grad.dtype), None


def _unpermute(out: Tensor, order: _Order) -> Tensor:
    """Every row in its slot, ``(slots, hidden)``; zero in slots without a row."""
    if recording(out):
        result: Tensor = _Unpermute.apply(out, order)  # type: ignore[no-untyped-call]
        return result
    return _in_slots(out, order)


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, order: _Order) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(order.top_k_index)
        return _in_slots(out, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.order.by(*ctx.saved_tensors).slots), None


def _in_slots(rows: Tensor, order: _Order) -> Tensor:
    if order.pairs < len(order.rows):
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    return rows.index_select(0, order.rows)


def _linear(rows: Tensor, projection: Projection, bias: Tensor | None, order: _Order, experts: Experts) -> Tensor:
    """Each expert's rows times its matrix, ``(pairs, out)``."""
    matrices = reference.tensors_of(projection)
    if recording(rows, bias, *matrices):
        form = _Form(order, experts.transposed, experts.idle == "none")
        result: Tensor = _Linear.apply(form, rows, bias, *matrices)  # type: ignore[no-untyped-call]
        return result
    return _multiply(rows, matrices, bias, order, transposed=experts.transposed)


class _Form(NamedTuple):
    """How rows are multiplied; *skip* as for `reference.linear`."""

    order: _Order
    transposed: bool
    skip: bool


def _multiply(
    rows: Tensor, matrices: Sequence[Tensor], bias: Tensor | None, order: _Order, *, transposed: bool
) -> Tensor:
    out = _times(rows, matrices, order, transposed=transposed)
    if bias is not None:
        for piece, expert in zip(_pieces(out, order), order.hit, strict=True):
            piece.add_(bias[expert])
    return out


def _times(rows: Tensor, matrices: Sequence[Tensor], order: _Order, *, transposed: bool) -> Tensor:
    by_expert: Projection = matrices
    if matrices[0].dim() == 3:
        by_expert = matrices[0]
        stacked = by_expert if transposed else by_expert.transpose(1, 2)
        if (together := grouped_matmul(rows, stacked, order.sizes, order.hit)) is not None:
            return together
    factors = [by_expert[expert] if transposed else by_expert[expert].t() for expert in order.hit]
    out = rows.new_empty(len(rows), factors[0].shape[1])
    for piece, factor, into in zip(_pieces(rows, order), factors, _pieces(out, order), strict=True):
        matmul(piece, factor, into)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, rows: Tensor, bias: Tensor | None, *matrices: Tensor) -> Tensor:
        needs_rows, _, *needs = ctx.needs_input_grad[1:]
        # The backward needs only the shape of what is not saved, which may be written into.
        ctx.form, ctx.bias, ctx.matrices = form, bias, () if needs_rows else matrices
        saved = matrices if needs_rows else ()
        ctx.save_for_backward(form.order.top_k_index, rows if any(needs) else None, *saved)
        return _multiply(rows, matrices, bias, form.order, transposed=form.transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index, rows, *saved), bias = ctx.saved_tensors, ctx.bias
        form, matrices = ctx.form._replace(order=ctx.form.order.by(index)), saved or ctx.matrices
        needs_rows, needs_bias, *needs = ctx.needs_input_grad[1:]
        if differentiated_again() or not plain(grad):
            if rows is None:  # the gradient of rows does not depend on them
                rows = matrices[0].new_zeros(len(grad), matrices[0].shape[-2 if form.transposed else -1])
            formula = functools.partial(_formula, form)
            return (None, *vjp(formula, (rows, bias, *matrices), ctx.needs_input_grad[1:], (grad,)))
        order, transposed = form.order, form.transposed
        grad = grad.contiguous()
        of_rows = _times(grad, matrices, order, transposed=not transposed) if needs_rows else None
        of_bias = None
        if needs_bias:
            of_bias = torch.zeros_like(bias)
            for piece, expert in zip(_pieces(grad, order), order.hit, strict=True):
                torch.sum(piece, 0, out=of_bias[expert])
        gradients: list[Tensor | None] = [None for _ in needs]
        if rows is not None and matrices[0].dim() == 3:
            gradients = [_stacked_gradient(matrices[0], rows, grad, order, transposed=transposed)]
        elif rows is not None:
            gradients = _gradients(matrices, needs, rows, grad, form)
        return None, of_rows, of_bias, *gradients


def _formula(form: _Form, rows: Tensor, bias: Tensor | None, *matrices: Tensor) -> Tensor:
    """The formula of `_Linear`, in operations that can be differentiated again."""
    projection = reference.projection_of(matrices)
    hit, sizes = torch.tensor([form.order.hit, form.order.sizes], device=rows.device)
    experts = hit.repeat_interleave(sizes)
    ends = torch.searchsorted(experts, torch.arange(len(projection), device=rows.device), right=True)
    order = reference.Order(form.order.slots, form.order.rows, ends, experts)
    return reference.linear(rows, projection, order, bias, transposed=form.transposed, skip=form.skip)


def _stacked_gradient(weight: Tensor, rows: Tensor, grad: Tensor, order: _Order, *, transposed: bool) -> Tensor:
    left, right = (rows, grad) if transposed else (grad, rows)
    if order.hit[-1] + 1 == len(weight):
        together = grouped_matmul(left.t(), right, order.sizes, order.hit)
        if together is not None:
            return together
    gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for expert in {*range(len(weight))}.difference(order.hit):
        gradient[expert].zero_()
    for a, b, expert in zip(_pieces(left, order), _pieces(right, order), order.hit, strict=True):
        matmul(a.t(), b, gradient[expert])
    return gradient


def _gradients(
    matrices: Sequence[Tensor], needs: Sequence[bool], rows: Tensor, grad: Tensor, form: _Form
) -> list[Tensor | None]:
    order = form.order
    gradients: list[Tensor | None] = [
        torch.zeros_like(m) if need and not form.skip else None for m, need in zip(matrices, needs, strict=True)
    ]
    left, right = (rows, grad) if form.transposed else (grad, rows)
    for a, b, expert in zip(_pieces(left, order), _pieces(right, order), order.hit, strict=True):
        if needs[expert]:
            gradient = torch.empty_like(matrices[expert], memory_format=torch.contiguous_format)
            matmul(a.t(), b, gradient)
            gradients[expert] = gradient
    return gradients


def _gated(experts: Experts, gate: Tensor, up: Tensor | None) -> Tensor:
    if not isinstance(experts.activation, str):
        return reference.gated(experts, gate, up)
    constants = (experts.activation, experts.layout, experts.limit, experts.alpha)
    if gate.shape[-1] > 2 and worth_compiling(gate.shape, gate, up):
        return _fused_gate(constants, gate, up)
    return gate_formula(gate, up, *constants)


def gate_formula(
    gate: Tensor, up: Tensor | None, activation: str, layout: str, limit: float | None, alpha: float
) -> Tensor:
    """The reference's gate as a formula to compile."""
    return reference.apply_gate(gate, up, activation, layout, limit, alpha)


def _weighed(slots: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The weighted sum of the slots of each token."""
    promoted = torch.promote_types(slots.dtype, weights.dtype)
    if promoted is slots.dtype:
        weights = weights.to(promoted)  # exact, and one program for all dtypes that autocast gives routing weights
    if dtype not in (promoted, slots.dtype):
        return _weighed(slots, weights, promoted).to(dtype)
    tokens, k = weights.shape
    rows = slots.view(tokens, -1)
    if worth_compiling(rows.shape, rows, weights):
        return _fused_weigh((k, dtype), rows, weights)
    return weigh_formula(rows, weights, k, dtype)


def weigh_formula(slots: Tensor, weights: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """The reference's weighted sum as a formula to compile; *slots* is ``(tokens, k · hidden)``."""
    return reference.weigh(slots.view(slots.shape[0], k, -1), weights).to(dtype)


_fused_gate = Compiled(gate_formula)
_fused_weigh = Compiled(weigh_formula)
