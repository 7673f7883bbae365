"""Rows sorted by group, each group times a matrix of its own, in plain PyTorch that every tracer can follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseplug_backends.tracing import is_mapped, is_traced, is_wrapped


def linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each group by its matrix.

    Args:
        rows: ``(rows, in)``, sorted by group.
        weight: ``(groups, in, out)``.
        ends: ``(groups,)`` integers, where the rows of each group end.

    Returns:
        ``(rows, out)``; zero for rows after the last end.
    """
    if is_traced():
        # The number of rows in a group is data, which no tracer can follow. So a tracer sees one operation.
        result: Tensor = _linear(rows, weight, ends)
        return result
    if is_mapped(rows, weight, ends):  # then the number of rows in a group is not one number
        return _each_by_its_own(rows, weight, ends)
    return walk(rows, weight.unbind(), ends, skip=False)


def walk(rows: Tensor, matrices: Sequence[Tensor], ends: Tensor, *, skip: bool) -> Tensor:
    """`linear` for matrices one by one, in operations that can be differentiated any number of times.

    With *skip*, groups without rows are left out, so their matrices have no gradient; otherwise it is zero.
    """
    if is_mapped(rows, ends, *matrices):
        return _each_by_its_own(rows, torch.stack(list(matrices)), ends)
    pieces = [rows[start:end] @ matrices[group] for group, start, end in _groups(ends) if end > start or not skip]
    done = sum(len(piece) for piece in pieces)
    return torch.cat([*pieces, rows.new_zeros(len(rows) - done, matrices[0].shape[-1])])


def _each_by_its_own(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`linear` with a matrix for each row, so that no shape depends on the groups."""
    numbers = torch.arange(rows.shape[0], device=rows.device)
    group = (numbers[:, None] >= ends).sum(1)
    matrices = weight.index_select(0, group.clamp(max=weight.shape[0] - 1))
    return (rows[:, None] @ matrices)[:, 0].masked_fill((group >= weight.shape[0])[:, None], 0)


def _groups(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    start = 0
    # torch.func.grad wraps tensors without batching them, and torch 2.7 has no tolist() for wrapped tensors.
    numbers = [end.item() for end in ends] if is_wrapped(ends) else ends.tolist()
    for group, end in enumerate(numbers):
        yield group, start, end
        start = end


@torch.library.custom_op("fuseplug_moe::grouped_linear", mutates_args=())
def _linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    for group, start, end in _groups(ends):
        if end > start:
            torch.mm(rows[start:end], weight[group], out=out[start:end])
    return out


@torch.library.custom_op("fuseplug_moe::grouped_linear_weight", mutates_args=())
def _weight_gradient(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_zeros(ends.shape[0], rows.shape[1], grad.shape[1])
    for group, start, end in _groups(ends):
        if end > start:
            torch.mm(rows[start:end].t(), grad[start:end], out=out[group])
    return out


@_linear.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    del ends
    return rows.new_empty(rows.shape[0], weight.shape[2])


@_weight_gradient.register_fake
def _(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    of_rows = _linear(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    of_weight = _weight_gradient(rows, grad, ends) if ctx.needs_input_grad[1] else None
    return of_rows, of_weight, None


_linear.register_autograd(_backward, setup_context=_keep)
