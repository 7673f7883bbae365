"""RoPE by ``npu_rotary_mul`` of torch_npu, on Ascend NPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by

from ... import reference
from .layouts import OperandLayout, find_layout

if TYPE_CHECKING:
    from ...reference import Variant
    from .layouts import Mode


def compute(variant: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """`fuseplug_rope.reference.rope`, fused: the same arguments, result and errors.

    It takes one launch for q and one for k, forward and backward, and one more for each to join the elements that are
    not rotated. The other launches are on tables, which are smaller than q by its number of heads. The reference
    computes calls beyond the limits of the operation. One limit is not checked, tables in [-1, 1]: the check would make
    the host wait, and the operation is linear in the tables.

    If the tables are wider than x, x is widened: the operation would round the tables to the dtype of x, and lose what
    a model has float32 tables for. If all have one dtype, there is nothing to lose, and no cast.
    """
    xs = (q,) if k is None else (q, k)
    layouts = []
    for x in xs:
        layout = find_layout(x, cos, sin, variant.width_rotated(cos), _mode(variant))
        if layout is None or variant.is_cast(x):
            return by_reference(reference.compute, variant, q, k, cos, sin)
        layouts.append(layout)
    tables = _tables(variant, cos, sin)
    q_out, *k_out = [
        _rotated(variant, x, *tables, seen, reference.result_dtype(variant, x, q, cos, sin))
        for x, seen in zip(xs, layouts, strict=True)
    ]
    return q_out, k_out[0] if k_out else None


rope = computed_by(compute, reference.rope)


class _Rotation(torch.autograd.Function):
    """``npu_rotary_mul`` of four-dimensional tensors, with a derivative that keeps only the tables.

    It keeps x, too, if the tables want gradients. torch_npu's own derivative keeps x until the backward, reads it there
    and computes gradients of the tables, whether wanted or not: for 4096 tokens of 32 and 8 heads of 128 in bfloat16,
    it keeps 40 MiB in each layer. But the gradient of a rotation is a rotation of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, mode: Mode) -> Tensor:
        ctx.mode = mode
        ctx.save_for_backward(cos, sin, *([x] if any(ctx.needs_input_grad[1:3]) else []))
        return _op(x, cos, sin, mode)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *kept = ctx.saved_tensors
        needs_x, needs_cos, needs_sin, _ = ctx.needs_input_grad
        order = "halves" if ctx.mode == "half" else "pairs"
        of_x = of_cos = of_sin = None
        if needs_x:
            # Each coordinate of a plane may have its own angle: in the transposed matrix, the other coordinate's.
            first, second = reference.planes(sin, order)
            back = reference.joined(-second, -first, order)
            of_x = _rotation(grad, cos, back, ctx.mode)
        if needs_cos:
            of_cos = _product(grad, kept[0], cos)
        if needs_sin:
            first, second = reference.planes(kept[0], order)
            of_sin = _product(grad, reference.joined(-second, first, order), sin)
        return of_x, of_cos, of_sin, None


def _rotation(x: Tensor, cos: Tensor, sin: Tensor, mode: Mode) -> Tensor:
    rotate = _Rotation.apply if torch.is_grad_enabled() else _op
    rotated: Tensor = rotate(x, cos, sin, mode)
    return rotated


def _op(x: Tensor, cos: Tensor, sin: Tensor, mode: Mode) -> Tensor:
    if cos.requires_grad or sin.requires_grad:
        # The limit for tables that want gradients is one of torch_npu's derivative, which is not used.
        cos, sin = cos.detach(), sin.detach()
    rotated: Tensor = torch.ops.npu.npu_rotary_mul(x, cos, sin, mode)
    return rotated


def _product(grad: Tensor, factor: Tensor, table: Tensor) -> Tensor:
    """The gradient of *table*, which was multiplied with *factor*, summed in float32."""
    return (grad.float() * factor.float()).sum_to_size(table.shape).to(table.dtype)


def _mode(variant: Variant) -> Mode:
    return "half" if variant.writes == "halves" else "interleave"


def _tables(variant: Variant, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin for each rotated element."""
    if variant.table == "first-half":
        cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
    if variant.table != "full":
        cos, sin = (reference.joined(table, table, variant.writes) for table in (cos, sin))
    if variant.negated:
        sin = -sin
    return cos, sin


def _rotated(variant: Variant, x: Tensor, cos: Tensor, sin: Tensor, seen: OperandLayout, dtype: torch.dtype) -> Tensor:
    wide = _working_dtype(x, cos, sin)
    source, rest = _split(seen.of_tensor(x), cos.shape[-1], variant)
    source = source.to(wide)
    if variant.reads != variant.writes:
        # From pairs to halves, as the transpose of a matrix: one copy, and one in the backward.
        source = torch.unflatten(source, -1, (source.shape[-1] // 2, 2)).transpose(-1, -2).flatten(-2)
    y = _rotation(source, seen.of_table(cos.to(wide)), seen.of_table(sin.to(wide)), _mode(variant)).to(dtype)
    if rest is not None:
        # Joined in the order of memory, before the result gets its shape back.
        y = reference.merged(y, rest.to(dtype), variant)
    y = seen.undo(y)
    # Callers may view the result for a contiguous tensor. If heads were seen last, it is not contiguous yet.
    return y.contiguous() if x.is_contiguous() else y


def _split(x: Tensor, rotated: int, variant: Variant) -> tuple[Tensor, Tensor | None]:
    """`reference.split` in one operation, whose backward joins the gradients, rather than pad and add them."""
    more = x.shape[-1] - rotated
    if not more:
        return x, None
    if variant.width == "trailing":
        rest, source = torch.split(x, [more, rotated], dim=-1)
    else:
        source, rest = torch.split(x, [rotated, more], dim=-1)
    return source, rest


def _working_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))
