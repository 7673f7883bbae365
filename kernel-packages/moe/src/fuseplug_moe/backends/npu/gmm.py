"""Grouped matmuls of torch_npu that can be differentiated: npu_grouped_matmul itself silently gives no gradient.

op-plugin's ``torch_npu-npu_grouped_matmul.md`` and CANN's ``aclnnGroupedMatmulV5.md`` say what the operation takes. An
Ascend 950 takes no float32, and takes a list of weights only if every row belongs to a group. Groups are given by their
numbers of rows, one for each expert. The groups may end before the rows do, according to CANN's page (op-plugin's does
not say so): the remaining rows are neither read nor written, so in a result they contain whatever the memory held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuseplug_backends.npu import is_950

from ...reference import Projection, first
from ..counts_on_host import HostCounts

DTYPES = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}
"""The dtypes that rows and weights share, and for each the dtype of the bias."""

_INNER = 65536
"""The bound below which the contiguous dimension of every operand must stay, forward and backward."""
_GROUPS = 1024
"""The most groups for one stacked weight."""
_LISTED = 128
"""The most weights in a list."""
_BLOCK = 16
"""The columns in a block of the matrix unit."""


def takes(projection: Projection) -> bool:
    """Whether the grouped matmul is documented for this weight, and for its gradients."""
    weight = first(projection)
    return (
        weight.dtype in DTYPES
        and not (weight.dtype is torch.float32 and is_950())
        and 1 <= len(projection) <= _GROUPS
        and all(0 < size < _INNER for size in weight.shape[-2:])
        and (weight.is_contiguous() or weight.transpose(-2, -1).is_contiguous())
    )


class GmmFunction(torch.autograd.Function):
    """Multiplies rows that are sorted by group, each group by its matrix of one stacked weight.

    ``GmmFunction.apply(x, weight, group_list, bias)``, the bias optional:

    - *x*, ``(rows, in)``;
    - *weight*, ``(groups, in, out)`` in the dtype of *x*, contiguous or the transpose of a contiguous tensor;
    - *group_list*, ``(groups,)`` int64 on the device, the number of rows of each group, together at most all rows;
    - *bias*, ``(groups, out)``, in float32 for bfloat16, else in the dtype of *x*.

    It returns ``(rows, out)``. Rows after the last group are undefined in the result and in the gradient of *x*, and do
    not count in the other gradients. The gradient of a group without rows is zero. Gradients cannot be differentiated
    again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group_list: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply, and keep only what a wanted gradient needs."""
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        x = _ordered(x)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, group_list)
        ctx.transposed = not weight.is_contiguous()
        return _gmm(x, [weight], group_list, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute each wanted gradient by a grouped matmul."""
        x, weight, group_list = ctx.saved_tensors
        grad = _ordered(grad)
        needs_bias = len(ctx.needs_input_grad) > 3 and ctx.needs_input_grad[3]
        return (
            None if weight is None else _gmm(grad, [weight.transpose(1, 2)], group_list),
            None if x is None else _weight_gradient(x, grad, group_list, transposed=ctx.transposed),
            None,
            _bias_gradient(grad, group_list) if needs_bias else None,
        )[: len(ctx.needs_input_grad)]


class HybridGmmFunction(torch.autograd.Function):
    """`GmmFunction` with a separate weight for each group, as in models whose experts are modules.

    ``HybridGmmFunction.apply(x, group_list, bias, host_counts, *weights)``: the weights are ``(in, out)``, all
    contiguous or all transposes of contiguous tensors. *bias* may be ``None``. *host_counts* is the `HostCounts` of
    *group_list* if the weight of a group without rows is to have the gradient ``None``; otherwise it is ``None``, and
    the gradient of such a weight is zero.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group_list: Tensor, bias: Tensor | None, host_counts: HostCounts | None, *weights: Tensor
    ) -> Tensor:
        """Multiply, and keep only what a wanted gradient needs."""
        needs_x, *_ = ctx.needs_input_grad
        needs_weight = any(ctx.needs_input_grad[4:])
        x = _ordered(x)
        ctx.save_for_backward(x if needs_weight else None, group_list, *(weights if needs_x else ()))
        ctx.transposed = not weights[0].is_contiguous()
        ctx.host_counts = host_counts
        return _gmm(x, _operand(weights, transposed=ctx.transposed), group_list, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute each wanted gradient by a grouped matmul."""
        x, group_list, *weights = ctx.saved_tensors
        grad = _ordered(grad)
        of_x = of_bias = None
        if weights:
            backwards = _operand([weight.t() for weight in weights], transposed=not ctx.transposed)
            of_x = _gmm(grad, backwards, group_list)
        if ctx.needs_input_grad[2]:
            of_bias = _bias_gradient(grad, group_list)
        needs = ctx.needs_input_grad[4:]
        of_weights: list[Tensor | None] = [None for _ in needs]
        if x is not None:
            wanted = needs if ctx.host_counts is None else map(min, needs, ctx.host_counts.positive(group_list))
            gradients = _weight_gradient(x, grad, group_list, transposed=ctx.transposed).unbind()
            of_weights = [gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)]
        return of_x, None, of_bias, None, *of_weights


def _gmm(
    x: Tensor, weights: Sequence[Tensor], group_list: Tensor, bias: Tensor | None = None, *, group_type: int = 0
) -> Tensor:
    """Multiply groups along the rows of *x*, or, for ``group_type=2``, along its columns, and sum over these."""
    biases = None
    if bias is not None:
        biases = [bias] if len(weights) == 1 else list(bias.unbind())
    products: list[Tensor] = torch.ops.npu.npu_grouped_matmul(
        [x],
        weights,
        bias=biases,
        group_list=group_list,
        split_item=2,  # the result in one tensor
        group_type=group_type,
        # Sizes are accepted only of more than one group; for a single group, the sum so far is the same number.
        group_list_type=1 if len(group_list) > 1 else 0,
    )
    return products[0]


def _ordered(rows: Tensor) -> Tensor:
    """*rows* with the strides of contiguous rows.

    CANN reads from the strides whether an operand is transposed. It includes the strides of dimensions of size 1, which
    torch ignores, and so refuses a single row with other strides.
    """
    width = rows.shape[1]
    return rows if rows.stride() == (width, 1) else rows.clone(memory_format=torch.contiguous_format)


def _weight_gradient(x: Tensor, grad: Tensor, group_list: Tensor, *, transposed: bool) -> Tensor:
    """``(groups, in, out)``, laid out in memory as the weight is.

    Autograd copies a gradient that is laid out otherwise into the one that a leaf keeps.
    """
    if transposed:
        return _gmm(grad.t(), [x], group_list, group_type=2).transpose(1, 2)
    return _gmm(x.t(), [grad], group_list, group_type=2)


def _bias_gradient(grad: Tensor, group_list: Tensor) -> Tensor:
    """The sum of each group's rows: the gradient of a weight whose input is one.

    Nothing is added atomically, and rows after the last group do not count. The input of ones is a block wide: 32 bytes
    a row in half precision, beside the row of *grad*.
    """
    ones = grad.new_ones(len(grad), _BLOCK)
    return _gmm(ones.t(), [grad], group_list, group_type=2)[:, 0].to(DTYPES[grad.dtype])


def _operand(weights: Sequence[Tensor], *, transposed: bool) -> list[Tensor]:
    """The weights as a list, where that is documented: up to 128, all transposed or none, and not in float32.

    Otherwise one stacked copy, made for each call, forward and backward, and not kept in between. It takes the memory
    of one projection during the call. Ascend 950 always gets the copy: with experts elsewhere, some rows would belong
    to no weight of a list.
    """
    listed = 1 < len(weights) <= _LISTED and weights[0].dtype is not torch.float32
    if listed and len({weight.stride() for weight in weights}) == 1 and not is_950():
        return list(weights)
    if transposed:
        return [torch.stack([weight.t() for weight in weights]).transpose(1, 2)]
    return [torch.stack(list(weights))]
