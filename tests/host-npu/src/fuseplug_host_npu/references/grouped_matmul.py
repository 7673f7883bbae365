"""Grouped matmul: many matrix products at once, one for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..limits import sources
from ..machine import machine
from .common import wide
from .registry import reference
from .values import require_values

_ROWS, _INNER = 0, 2
"""Values of ``group_type``: a group is a part of the rows of x, or of the dim that is summed over."""


@reference("npu_grouped_matmul", "npu_grouped_matmul.List")
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **quantisation: Any,
) -> list[Tensor]:
    """``x[i] @ weight[i] + bias[i]`` for each i.

    *group_list* has the ends of the groups, or with ``group_list_type=1`` their sizes. Groups may end before x does: no
    kernel writes the rows after them, so these rows are NaN here. An empty group has no rows, or with ``group_type=2``
    a product of zeros. For an empty x, a kernel writes nothing at all.
    """
    if act_type or any(value is not None for value in quantisation.values()):
        raise NotImplementedError("npu_grouped_matmul has a reference without quantisation and activation only")
    ends = _ends(group_list, group_list_type or 0)
    if ends:
        listed_on_950 = machine().is_950 and len(weight) > 1
        rows_of_x = x[0].shape[1 if group_type == _INNER else 0] if len(x) == 1 else None
        _within(ends, rows_of_x, whole=listed_on_950)
    if group_type == _INNER:
        return [_written(x[0], _split_inner(x[0], weight[0], ends))]
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else list(weight)
    biases: list[Tensor | None] = [None] * len(weights)
    if bias:
        biases = list(bias[0]) if len(bias) == 1 and bias[0].dim() == 2 else list(bias)
    rows = list(x)
    if ends and len(x) == 1:
        rows = [x[0][start:end] for start, end in zip([0, *ends], ends, strict=False)]
    products = [_product(*each) for each in zip(rows, weights, biases, strict=True)]
    if split_item in (0, 1):
        return [_written(*each) for each in zip(rows, products, strict=True)]
    whole = x[0].new_full((sum(len(each) for each in x), products[0].shape[1]), float("nan"))
    written = torch.cat(products)
    whole[: len(written)] = written
    return [_written(x[0], whole) if len(x) == 1 else whole]


def _written(x: Tensor, product: Tensor) -> Tensor:
    """*product*, or NaN if *x* is empty: a kernel then leaves what the memory held."""
    return product if x.numel() else torch.full_like(product, float("nan"))


def _within(ends: list[int], rows: int | None, *, whole: bool) -> None:
    """Require that the groups follow each other, and do not go beyond the rows.

    If *whole*, as for a list of weights on Ascend 950, the groups must end where the rows do.
    """
    op, source = "npu_grouped_matmul", sources.GROUPED
    follows = all(start <= end for start, end in zip([0, *ends], ends, strict=False))
    require_values(follows, op, "group_list", "of sizes, or of ends that do not fall", f"ends {ends}", source)
    if rows is not None:
        require_values(ends[-1] <= rows, op, "group_list", f"of at most {rows} rows in all", f"ends {ends}", source)
        whole_or_any = ends[-1] == rows or not whole
        asked = f"of all {rows} rows, as weight is a list"
        require_values(whole_or_any, op, "group_list", asked, f"ends {ends}", sources.LISTED_950)


def _ends(group_list: Tensor | Sequence[int] | None, kind: int) -> list[int]:
    """The ends of the groups."""
    if group_list is None:
        return []
    if not isinstance(group_list, Tensor):
        return [int(end) for end in group_list]
    return [int(end) for end in (group_list.cumsum(0) if kind == 1 else group_list)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = wide(x) @ wide(weight)
    return (product if bias is None else product + wide(bias)).to(x.dtype)


def _split_inner(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    groups = zip([0, *ends], ends, strict=False)
    return torch.stack([_product(x[:, start:end], weight[start:end], None) for start, end in groups])


@reference("npu_grouped_matmul_add_")
def grouped_matmul_add_(
    input: Tensor,  # noqa: A002
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    """``input += xᵀ @ weight`` for each group of the rows of both: weight gradients, accumulated."""
    del transpose_x, transpose_weight, group_type  # the defaults are all there is
    products = _split_inner(wide(x).T, wide(weight), _ends(group_list, group_list_type or 0))
    return input.copy_(wide(input) + products.reshape(input.shape))


@reference("npu_grouped_matmul_add")
def grouped_matmul_add(input: Tensor, **rest: Any) -> Tensor:  # noqa: A002
    """As `grouped_matmul_add_`, into a new tensor."""
    return grouped_matmul_add_(input.clone(), **rest)
