"""How the dimensions of a tensor lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


def keeping_order(compute: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
    """Call *compute*, which treats all rows alike, and give its result the memory order of the dimensions of *x*.

    Elementwise operations keep the order of their input, so a caller may view their result in a shape that only this
    order allows, as ``norm(x.transpose(1, 2)).transpose(1, 2).view(...)`` does.

    Args:
        compute: Takes *x* and *others*, and returns one contiguous tensor with the rank of *x*. Its last dimension is a
            row.
        x: A tensor of any layout.
        others: Tensors with the rank of *x*, or with another rank if all rows share them.
    """
    order = None if x.is_contiguous() else _order_in_memory(x)
    if order is None:
        return compute(x, *others)
    last = x.dim() - 1
    rows = [*(dim for dim in order if dim != last), last]
    y = compute(*[t if t is None or t.dim() != x.dim() else t.permute(rows) for t in (x, *others)])
    y = y.permute(_inverse(rows))
    return y if order == rows else y.permute(order).contiguous().permute(_inverse(order))


def strides_of(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """The strides of a tensor of *shape* without gaps in memory.

    Args:
        shape: The sizes of the tensor.
        order: The dimensions, the outermost in memory first; ``None`` for a contiguous tensor.
    """
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape)) if order is None else order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _order_in_memory(x: Tensor) -> list[int] | None:
    """The dimensions of *x*, the outermost in memory first; ``None`` if they have this order, or one is broadcast."""
    steps: list[int] = []
    for size, step in zip(x.shape, x.stride(), strict=True):
        if size > 1 and step == 0:
            return None
        # The stride of a dimension of one element means nothing: the dimension stays with the one before.
        steps.append(step if size > 1 or not steps else steps[-1])
    order = sorted(range(x.dim()), key=lambda dim: -steps[dim])
    return None if order == [*range(x.dim())] else order


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
