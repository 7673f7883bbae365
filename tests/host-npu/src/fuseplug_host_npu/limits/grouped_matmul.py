"""Grouped matmul: many matrix products at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..machine import machine
from . import sources
from .common import FLOATS
from .registry import limit, require

_ROWS, _INNER = 0, 2
_COUNTS = 1
_ONE_OUTPUT = (2, 3)
_MOST_TENSORS, _MOST_GROUPS = 128, 1024
_INNERMOST = 65536
_BIAS = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}


@limit("npu_grouped_matmul", page="torch_npu-npu_grouped_matmul.md")
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    group_list: Tensor | Sequence[int] | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    **_: Any,
) -> None:
    """The limits of products without quantisation; `_rows` and `_inner` have the limits of each way of grouping."""
    for name, tensors in (("x", x), ("weight", weight)):
        require(0 < len(tensors) <= _MOST_TENSORS, name, f"1 to {_MOST_TENSORS} tensors", len(tensors))
        one = {tensor.dtype for tensor in (*x, *weight)}
        require(len(one) == 1 and one <= set(FLOATS), name, "of one dtype, float16, bfloat16 or float32", tensors)
        if machine().is_950:
            half = torch.float32 not in one
            require(half, name, "float16 or bfloat16 on Ascend 950", tensors, sources.GROUPED_950)
        for tensor in tensors:
            inner = _innermost(tensor)
            asked = f"of a contiguous dim below {_INNERMOST}"
            require(inner < _INNERMOST, name, asked, tensor)
    require(group_type in (-1, _ROWS, _INNER), "group_type", "-1, 0 or 2", group_type)
    if isinstance(group_list, Tensor):
        _groups(group_list, group_list_type or 0)
    single = len(x) == len(weight) == 1
    _bias(bias, x[0].dtype)
    if group_type == _ROWS and single:
        _rows(x[0], weight[0], group_list, split_item)
    if group_type == _ROWS and len(weight) > 1:
        _listed(weight, group_list)
    if group_type == _INNER:
        require(single, "x", "one tensor, and weight, where group_type is 2", [*x, *weight])
        _inner(x[0], weight[0], split_item)
        require(not bias, "bias", "left out where group_type is 2", bias)
    _transposition(x, weight, group_type)


def _is_transposed(tensor: Tensor) -> bool:
    """Whether CANN takes the last two dims for transposed. It compares the actual strides, even of dims of size 1."""
    if tensor.dim() < 2 or tensor.stride()[-2:] != (1, tensor.shape[-2]):
        return False
    packed = tensor.shape[-2:].numel()
    for size, stride in zip(tensor.shape[-3::-1], tensor.stride()[-3::-1], strict=True):
        if stride != packed:
            return False
        packed *= size
    return True


def _transposition(x: Sequence[Tensor], weight: Sequence[Tensor], group_type: int | None) -> None:
    """All weights are transposed or none, and never both operands. One element alone is never transposed."""

    def any_of(tensors: Sequence[Tensor]) -> bool:
        return any(_is_transposed(each) and each.shape[-2:].numel() != 1 for each in tensors)

    inner = group_type == _INNER
    of_x = _is_transposed(x[0]) if inner else any_of(x)
    of_weight = any_of(weight) if inner else _is_transposed(weight[0])
    strides = f"of strides {[each.stride() for each in weight]} for {[list(each.shape) for each in weight]}"
    same = inner or all(_is_transposed(each) == of_weight for each in weight)
    require(same, "weight", "transposed in all its tensors, or in none", strides, sources.GROUPED)
    require(not (of_x and of_weight), "weight", "not transposed where x is", strides, sources.GROUPED)
    found = f"of strides {x[0].stride()} for {list(x[0].shape)}"
    if inner:
        asked = "the transpose of a contiguous tensor, of strides (1, size of its first dim)"
        require(of_x, "x", asked, found, sources.TRANSPOSED)
    else:
        require(not of_x, "x", "contiguous, which a transpose is not", found, sources.TRANSPOSED)


def _bias(bias: Sequence[Tensor] | None, dtype: torch.dtype) -> None:
    wanted = {_BIAS[dtype], dtype, torch.float32} if machine().is_950 else {_BIAS[dtype]}
    fits = all(each.dtype in wanted for each in bias or ())
    require(fits, "bias", f"{_BIAS[dtype]} where x is {dtype}", bias, sources.GROUPED)


def _listed(weight: Sequence[Tensor], group_list: Tensor | Sequence[int] | None) -> None:
    require(weight[0].dtype != torch.float32, "weight", "one tensor where it is float32", list(weight))
    one = {tuple(each.shape) for each in weight}
    require(len(one) == 1 and weight[0].dim() == 2, "weight", "of one shape, [in, out]", list(weight))
    groups = group_list.numel() if isinstance(group_list, Tensor) else len(group_list or weight)
    require(groups == len(weight), "group_list", f"of {len(weight)} groups, as weight has tensors", groups)


def _innermost(tensor: Tensor) -> int:
    """The size of the dim that is contiguous in memory."""
    return tensor.shape[-1] if tensor.dim() < 2 or tensor.stride(-1) == 1 else tensor.shape[-2]


def _groups(group_list: Tensor, kind: int) -> None:
    require(group_list.dtype == torch.int64, "group_list", "int64", group_list)
    require(group_list.dim() == 1, "group_list", "of one dim", group_list)
    require(kind in (0, _COUNTS), "group_list_type", "0 (where groups end) or 1 (their sizes)", kind)
    fewest = 2 if kind == _COUNTS else 1
    asked = f"of {fewest} to {_MOST_GROUPS} groups"
    require(fewest <= group_list.numel() <= _MOST_GROUPS, "group_list", asked, group_list)


def _rows(x: Tensor, weight: Tensor, group_list: Tensor | Sequence[int] | None, split_item: int | None) -> None:
    require(split_item in _ONE_OUTPUT, "split_item", "2 or 3 for one x and one weight", split_item)
    require(group_list is not None, "group_list", "given for one x and one weight", group_list)
    require(x.dim() == 2, "x", "[tokens, in]", x)
    require(weight.dim() == 3, "weight", "[groups, in, out]", weight)
    require(x.shape[1] == weight.shape[1], "weight", f"[groups, {x.shape[1]}, out], as x is {list(x.shape)}", weight)
    groups = group_list.numel() if isinstance(group_list, Tensor) else len(group_list or ())
    require(groups == weight.shape[0], "group_list", f"of {weight.shape[0]} groups, as weight has", groups)
    require(x.is_contiguous(), "x", "contiguous", f"strided {x.stride()}")
    plain = weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()
    require(plain, "weight", "contiguous, or the transpose(1, 2) of what is", f"strided {weight.stride()}")


def _inner(x: Tensor, weight: Tensor, split_item: int | None) -> None:
    require(split_item in _ONE_OUTPUT, "split_item", "2 or 3 where group_type is 2", split_item)
    require(x.dim() == 2, "x", "[in, tokens]", x)
    asked = f"[{x.shape[1]}, out], as x is {list(x.shape)}"
    require(weight.dim() == 2 and weight.shape[0] == x.shape[1], "weight", asked, weight)
    require(weight.is_contiguous(), "weight", "contiguous", f"strided {weight.stride()}")
