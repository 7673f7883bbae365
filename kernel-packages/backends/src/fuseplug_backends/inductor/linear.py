"""Compile a formula that is linear in one tensor, forward and backward, for any layout in memory.

Attention has q and k of many layouts, with tables broadcast over some of their dimensions: nothing is copied to bring
them into one layout. The backward of a linear formula needs neither its input nor its output, so only the tables are
saved.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..differentiating import differentiable_linear
from ..torch_private import reinterpret_tensor
from .compiled import plain
from .layout import strides_of
from .program import Program

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    Constants = tuple[Hashable, ...]
    Formula = Callable[..., Tensor]
    _Form = tuple[tuple[Constants, ...], bool]
    Memory = tuple[tuple[torch.Size, tuple[int, ...]], ...]

_MOST_VIEWS = 1 << 10
"""The number of layouts to remember. Generating text makes a new one for each length of the prompt."""


class CompiledLinear:
    """A formula that is linear in its first tensor, run for several such tensors at once, and its compiled programs.

    Leading dimensions are put in the order of memory and merged where all tensors allow, so that few programs serve
    every layout. There is one for each combination of constants, dtypes, widths, devices, number of remaining
    dimensions, and which of these are broadcast or have gaps in memory. Sizes do not matter.

    Args:
        formula: ``formula(x, *tables, *constants)``, returning a tensor with the shape of *x*, linear in *x*. It treats
            all leading dimensions alike, and in these the tables broadcast to *x*.
    """

    def __init__(self, formula: Formula) -> None:
        self.formula = formula
        self._programs: dict[Hashable, Program] = {}
        self._views: dict[tuple[bool, Memory], _Views] = {}
        self._differentiable = differentiable_linear(self._launched, self._transposed, self._formulas, plain)

    def __call__(
        self,
        constants: Sequence[Constants],
        xs: Sequence[Tensor],
        tables: Sequence[Tensor],
        *,
        keep_order: bool = True,
    ) -> Sequence[Tensor]:
        """Compute the formula for each of *xs*, where all tensors are `plain`.

        Args:
            constants: For each of *xs*, the formula's last arguments; compiled in.
            xs: ``(..., width)``, not empty, all of the same rank, with at least two dimensions.
            tables: Broadcastable to each of *xs* except in the last dimension; of no higher rank.
            keep_order: Whether the results' dimensions have the memory order of those of the first of *xs*; if not, the
                results are contiguous.

        Returns:
            The result for each of *xs*.
        """
        return self._differentiable((tuple(constants), keep_order), xs, tables)

    def _launched(self, form: _Form, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.run(form[0], xs, tables, keep_order=form[1])

    def _transposed(
        self, form: _Form, grads: Sequence[Tensor | None], tables: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> tuple[Tensor, ...]:
        wanted = [part for part in zip(form[0], grads, dtypes, strict=True) if part[1] is not None]
        constants, of_results, narrow = zip(*wanted, strict=True)
        return self.run(constants, of_results, tables, narrow)

    def _formulas(self, form: _Form, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Tensor]:
        return [self.formula(x, *tables, *constants) for x, constants in zip(xs, form[0], strict=True)]

    def run(
        self,
        constants: Sequence[Constants],
        xs: Sequence[Tensor],
        tables: Sequence[Tensor],
        transposed: tuple[torch.dtype, ...] | None = None,
        *,
        keep_order: bool = True,
    ) -> tuple[Tensor, ...]:
        """Compute the formula without recording anything.

        If *transposed* gives the dtypes of the inputs, *xs* are the gradients of the outputs, and the gradients of the
        inputs are computed.
        """
        tensors = [*xs, *tables]
        # Ask each tensor once: between matmuls, which empty the caches, asking takes a microsecond or two.
        memory = tuple([(t.shape, t.stride()) for t in tensors])
        views = self._views.get((keep_order, memory))
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            views = self._views[keep_order, memory] = _views(memory, len(xs), keep_order=keep_order)
        if views.copied:
            tensors = [t.contiguous() if n in views.copied else t for n, t in enumerate(tensors)]
        values = [reinterpret_tensor(t, size, stride) for t, (size, stride) in zip(tensors, views.inside, strict=True)]
        key = (tuple(constants), transposed, views.kind, tuple([(t.dtype, t.device) for t in tensors]))
        program = self._programs.get(key)
        if program is None:
            varying = [[dim for dim, size in enumerate(t.shape[:-1]) if size > 1] for t in values]
            new = _program(self.formula, tuple(constants), transposed, count=len(xs), varying=varying)
            program = self._programs.setdefault(key, new)
        results = program(*values)
        return tuple(
            [reinterpret_tensor(y, size, stride) for y, (size, stride) in zip(results, views.outside, strict=True)]
        )


class _Views(NamedTuple):
    """How a program sees tensors of given shapes and strides.

    Attributes:
        copied: The numbers of the tensors that are made contiguous first.
        inside: Size and stride of each tensor as the program gets it.
        outside: Size and stride of each result as the caller gets it. The program returns it densely packed.
        kind: The properties of the views that a program is compiled for.
    """

    copied: frozenset[int]
    inside: list[tuple[tuple[int, ...], tuple[int, ...]]]
    outside: list[tuple[tuple[int, ...], tuple[int, ...]]]
    kind: Hashable


def _views(memory: Memory, count: int, *, keep_order: bool) -> _Views:
    rank = len(memory[0][0])
    # Each row must be one piece of memory. The gradient of a sum repeats one number: a copy has an element for each.
    copied = frozenset(n for n, (_, stride) in enumerate(memory) if stride[-1] != 1 or (n < count and 0 in stride))
    strides = [strides_of(shape) if n in copied else stride for n, (shape, stride) in enumerate(memory)]
    tensors = [_aligned(shape, stride, rank) for (shape, _), stride in zip(memory, strides, strict=True)]
    order = _order_of_memory(tensors[:count], rank) if keep_order else range(rank - 1)
    groups = _groups(tensors, order)
    inside = [
        (
            (*(math.prod(size[dim] for dim in group) for group in groups), size[-1]),
            (*(stride[group[-1]] for group in groups), stride[-1]),
        )
        for size, stride in tensors
    ]
    outside = [(tuple(shape), strides_of(shape, [*order, rank - 1])) for shape, _ in memory[:count]]
    return _Views(copied, inside, outside, tuple([_kind(size, stride) for size, stride in inside]))


def _aligned(shape: torch.Size, stride: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """Size and stride with as many dimensions as the first tensor has; a dimension that only repeats has size 1."""
    sizes = [1 if step == 0 else size for size, step in zip(shape[:-1], stride[:-1], strict=True)]
    return [1] * (rank - len(shape)) + [*sizes, shape[-1]], [0] * (rank - len(shape)) + list(stride)


def _order_of_memory(xs: Sequence[tuple[list[int], list[int]]], rank: int) -> list[int]:
    """The leading dimensions, the outermost in memory first."""

    def step(dim: int) -> int:
        return max((stride[dim] for size, stride in xs[:1] if size[dim] > 1), default=0) or max(
            stride[dim] for _, stride in xs
        )

    return sorted(range(rank - 1), key=step, reverse=True)


def _groups(tensors: Sequence[tuple[list[int], list[int]]], order: Sequence[int]) -> list[list[int]]:
    """Groups of neighbouring dimensions that every tensor can merge, without those of size 1 in every tensor."""
    groups: list[list[int]] = []
    for dim in order:
        if all(size[dim] == 1 for size, _ in tensors):
            continue
        if groups and all(_mergeable(size, stride, outer=groups[-1][-1], inner=dim) for size, stride in tensors):
            groups[-1].append(dim)
        else:
            groups.append([dim])
    return groups


def _mergeable(size: list[int], stride: list[int], *, outer: int, inner: int) -> bool:
    if size[outer] == 1 or size[inner] == 1:
        return size[outer] == size[inner]
    return stride[outer] == size[inner] * stride[inner]


def _kind(size: tuple[int, ...], stride: tuple[int, ...]) -> Hashable:
    """The properties of a view that are compiled in: rank, width, which dimensions are broadcast, which have no gap."""
    apart = [dim for dim, extent in enumerate(size) if extent > 1]
    return len(size), size[-1], tuple([(i, stride[i] == size[j] * stride[j]) for i, j in itertools.pairwise(apart)])


def _program(
    formula: Formula,
    constants: Sequence[Constants],
    transposed: tuple[torch.dtype, ...] | None,
    *,
    count: int,
    varying: Sequence[Sequence[int]],
) -> Program:
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        xs, tables = tensors[:count], tensors[count:]
        return tuple([formula(x, *tables, *last).contiguous() for x, last in zip(xs, constants, strict=True)])

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        grads, tables = tensors[:count], tensors[count:]
        _, pull = torch.func.vjp(lambda *xs: forward(*xs, *tables), *_stand_ins(grads, transposed or ()))  # type: ignore[misc]
        return tuple([gradient.contiguous() for gradient in pull(grads)])

    return Program(forward if transposed is None else backward, varying)


def _stand_ins(grads: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Inputs of the right shape. The derivative of a linear function does not depend on their values."""
    return [torch.zeros_like(grad, dtype=dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
