"""The edges of an example: the same call with other sizes, other memory layouts, and zeros, NaNs or infinities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuseplug_verify import Example

from .torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten

Rearrangement = Callable[[Tensor], Tensor]


def _padding(tensor: Tensor) -> float:
    # NaN, so that it shows if a kernel reads between the elements.
    return float("nan") if tensor.is_floating_point() else 0


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else tensor.clone()


def _every_other(tensor: Tensor) -> Tensor:
    gaps = torch.full_like(tensor, _padding(tensor), requires_grad=False)
    return torch.stack([tensor, gaps], -1).flatten(-2)[..., ::2] if tensor.dim() else tensor.clone()


def _part_of_wider_rows(tensor: Tensor) -> Tensor:
    if not tensor.dim():
        return tensor.clone()
    edge = tensor.new_full((*tensor.shape[:-1], 3), _padding(tensor))
    return torch.cat([edge, tensor, edge], -1)[..., 3:-3]


def _offset(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.new_full((1,), _padding(tensor)), tensor.reshape(-1)])[1:].view(tensor.shape)


def _expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor) if tensor.dim() > 1 and len(tensor) > 1 else tensor.clone()


def _one_number(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:1].sum().expand_as(tensor)


MEMORY_LAYOUTS: dict[str, Rearrangement] = {
    "transposed in memory": _transposed,
    "every other element of a buffer": _every_other,
    "part of wider rows": _part_of_wider_rows,
    "not aligned": _offset,
    "expanded": _expanded,
}
"""The memory layouts of an argument; all but the last keep its values."""

UPSTREAM: dict[str, Rearrangement] = {
    "expanded from one number": _one_number,
    "transposed in memory": _transposed,
    "every other element of a buffer": _every_other,
}
"""The memory layouts of the gradient from above; ``sum().backward()`` sends the first."""


def shapes(example: Example) -> Iterator[tuple[str, Sequence[int], int, list[Example]]]:
    """Yield the example cut to 0, 1 and an odd number along each dimension but the last, and to 1 along all of them.

    Yields:
        A description of the cut, the dimensions, their new size, and the ways to cut the other arguments, likeliest
        first: along their dimensions of the same length, or along the same dimensions.
    """
    main = example.args[0]
    seen = set()
    for dim, size in enumerate(main.shape[:-1]):
        odd = size - 1 if size % 2 == 0 else size - 2
        for new, name in ((0, "empty"), (1, "one"), (odd, "odd")):
            if 0 <= new < size and (dim, new) not in seen:
                seen.add((dim, new))
                ways = [_cut(example, _as_long(size), new), _cut(example, _at(dim, size), new)]
                yield f"dimension {dim} {name} ({new} of {size})", (dim,), new, ways
    if sum(size > 1 for size in main.shape[:-1]) > 1:
        by_length = by_place = example
        for dim, size in enumerate(main.shape[:-1]):
            by_length, by_place = _cut(by_length, _as_long(size), 1), _cut(by_place, _at(dim, size), 1)
        yield "one row", range(main.dim() - 1), 1, [by_length, by_place]


def planted(example: Example, which: int, value: float) -> Example | None:
    """The example with *value* in the middle of its argument number *which*; ``None`` if *value* has no place there."""
    leaves, structure = tree_flatten((tuple(example.args), dict(example.kwargs)))
    tensor = leaves[which]
    if not (isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel()):
        return None
    leaves[which] = tensor.clone()
    leaves[which][torch.unravel_index(torch.tensor(tensor.numel() // 2, device="cpu"), tensor.shape)] = value
    args, kwargs = tree_unflatten(leaves, structure)
    return replace(example, args=args, kwargs=kwargs)


def zeroed(example: Example) -> Example:
    """The example with zeros as its main input."""
    return replace(example, args=(torch.zeros_like(example.args[0]), *example.args[1:]))


def with_each(example: Example, change: Callable[[Any], Any]) -> Example:
    """The example with *change* applied to each of its arguments, including those in containers."""
    args, kwargs = tree_map(change, (tuple(example.args), dict(example.kwargs)))
    return replace(example, args=args, kwargs=kwargs)


def arguments(example: Example) -> list[object]:
    """All arguments, including those in containers."""
    leaves: list[object] = tree_leaves((tuple(example.args), dict(example.kwargs)))
    return leaves


def _as_long(size: int) -> Callable[[Tensor], list[int]]:
    return lambda tensor: [i for i, length in enumerate(tensor.shape[:-1]) if length == size]


def _at(dim: int, size: int) -> Callable[[Tensor], list[int]]:
    return lambda tensor: [dim] if dim < tensor.dim() - 1 and tensor.shape[dim] == size else []


def _cut(example: Example, dims: Callable[[Tensor], list[int]], new: int) -> Example:
    def cut(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        for dim in dims(value):
            value = value.narrow(dim, 0, new)
        return value.contiguous()

    return with_each(example, cut)
