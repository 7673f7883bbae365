"""RoPE by Liger, which rotates in place and reads half of the tables."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from liger_kernel.ops.rope import rope_backward, rope_forward
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiable_linear, recording
from fuseplug_rope import reference
from fuseplug_rope.reference import Variant

from .launching import WIDEST, launch, serves, unseen_as_view


def compute(variant: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """`fuseplug_rope.reference.rope` by Liger: the same arguments, result and errors.

    The result is the reference's up to rounding. Liger rotates in place, so it gets copies of q and k, and in the
    backward copies of their gradients. Of tables with an angle for each element, it reads one half. Whether the other
    half is the same is tested once for each pair of tables, and the host waits for the device: once in each forward of
    a model whose layers share the tables.

    The reference computes calls with pairs of neighbours; with a q without a k, or with a k of another dtype, length or
    head size; with more than four dimensions; with tables that have two different halves, have gradients, or depend on
    more than the batch and the sequence; with dtypes other than float16, bfloat16 and float32; with empty tensors; and
    for tracers, functorch transforms and tensor subclasses. It also computes a backward that is to be differentiated
    again.
    """
    fitted = None if k is None else _fitted(variant, q, k, cos, sin)
    if k is None or fitted is None:
        return by_reference(reference.compute, variant, q, k, cos, sin)
    q_out, k_out = _rotate((variant, fitted.width, fitted.heads), (q, k), (cos, sin, fitted.cos, fitted.sin))
    return q_out, k_out


rope = computed_by(compute, reference.rope)


class _Fitted(NamedTuple):
    """The arguments of Liger besides q and k.

    Attributes:
        cos: ``(1 or batch, sequence, angles)``.
        sin: Likewise.
        width: How many elements of a head are rotated.
        heads: The dimension of the heads in q and k, counted from the end.
    """

    cos: Tensor
    sin: Tensor
    width: int
    heads: int


_Form = tuple[Variant, int, int]
"""The variant, and `width` and `heads` of `_Fitted`."""


def _fitted(variant: Variant, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> _Fitted | None:
    """The arguments of Liger in the place of *cos* and *sin*; ``None`` if Liger cannot compute the call."""
    width = variant.width_rotated(cos)
    if (
        (variant.reads, variant.writes) != ("halves", "halves")
        or variant.width == "trailing"
        or width % 2
        or not serves(q, k, cos, sin)
        or recording(cos, sin)
        or (q.dtype, cos.dtype, cos.shape) != (k.dtype, sin.dtype, sin.shape)
    ):
        return None
    heads = _heads(q, k, cos)
    if heads is None or max(q.shape[heads], k.shape[heads]) * width > WIDEST:
        return None
    if variant.table == "full" and not _alike(cos, sin):
        return None
    wide = variant.widen is not None or variant.widen_table
    dtype = torch.promote_types(torch.promote_types(q.dtype, torch.float32) if wide else q.dtype, cos.dtype)
    cos, sin = (_four(table).squeeze(heads).to(dtype) for table in (cos, sin))
    return _Fitted(cos, -sin if variant.negated else sin, width, heads)


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.dim())]


def _heads(q: Tensor, k: Tensor, cos: Tensor) -> int | None:
    """The dimension along which the angles are the same, -3 or -2; ``None`` if Liger cannot compute such a call."""
    if not (3 <= q.dim() == k.dim() <= 4 and cos.dim() <= 4 and q.shape[-1] == k.shape[-1]):
        return None
    q, k, cos = _four(q), _four(k), _four(cos)
    if q.shape[0] != k.shape[0] or cos.shape[0] not in (1, q.shape[0]):
        return None
    for heads, sequence in ((-3, -2), (-2, -3)):
        if cos.shape[heads] == 1 and q.shape[sequence] == k.shape[sequence] == cos.shape[sequence]:
            return heads
    return None


_answers: MutableMapping[Tensor, tuple[int, dict[Any, bool]]] = WeakTensorKeyDictionary()
"""For each tensor of which tables are views: its version when it was tested, and the answer for each of the views."""


def _alike(cos: Tensor, sin: Tensor) -> bool:
    """Whether each of the tables has two equal halves. The host waits for the answer, which is kept for the tables."""
    if cos.is_inference() or sin.is_inference():  # no version tells whether they were changed since
        return False
    kept = [_kept(table) for table in (cos, sin)]
    if None in kept and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    answers = [_looked_at(table) if answer is None else answer for table, answer in zip((cos, sin), kept, strict=True)]
    return all(answers)


def _owner(table: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """The tensor of which *table* is a view, and which view it is."""
    owner = table if table._base is None else table._base
    return owner, (table.storage_offset(), table.shape, table.stride(), table.dtype)


def _kept(table: Tensor) -> bool | None:
    owner, view = _owner(table)
    version, answers = _answers.get(owner, (-1, {}))
    return answers.get(view) if version == table._version else None


def _looked_at(table: Tensor) -> bool:
    half = table.shape[-1] // 2
    answer = torch.equal(table[..., :half], table[..., half:])
    owner, view = _owner(table)
    version, answers = _answers.get(owner, (-1, {}))
    _answers[owner] = table._version, {**(answers if version == table._version else {}), view: answer}
    return answer


def _rotated(
    turn: Callable[..., Any], q: Tensor, k: Tensor, fitted: _Fitted, dtype: torch.dtype, keeps_order: bool
) -> list[Tensor]:
    """Rotated copies of q and k in *dtype*, with the memory layout of the reference's results."""
    # Liger rotates in place if the memory is (batch, sequence, heads, head_dim).
    copies = [
        _tokens_first(x, fitted.heads).to(dtype, copy=True, memory_format=torch.contiguous_format) for x in (q, k)
    ]
    launch(turn, q, *(copy.transpose(1, 2) for copy in copies), *(fitted.cos, fitted.sin), rotary_dim=fitted.width)
    rotated = zip((q, k), copies, strict=True)
    return [unseen_as_view(_as_in(x, _tokens_first(y, fitted.heads), keeps_order)) for x, y in rotated]


def _tokens_first(x: Tensor, heads: int) -> Tensor:
    """*x* in four dimensions, with the sequence before the heads. A second call turns the dimensions back."""
    x = _four(x)
    return x.transpose(1, 2) if heads == -3 else x


def _as_in(x: Tensor, y: Tensor, keeps_order: bool) -> Tensor:
    """*y* in the shape of *x*, and in its memory order if *keeps_order*."""
    y = y.view(x.shape) if x.dim() == 4 else y.squeeze(0)
    like = torch.preserve_format if keeps_order else torch.contiguous_format
    strides = torch.empty_like(x, device="meta", memory_format=like).stride()
    return y if y.stride() == strides else torch.empty_like(x, dtype=y.dtype, memory_format=like).copy_(y)


def _forward(form: _Form, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Tensor]:
    (variant, width, heads), (q, k), (cos, sin, cos_fitted, sin_fitted) = form, xs, tables
    fitted, dtype = _Fitted(cos_fitted, sin_fitted, width, heads), reference.result_dtype(variant, q, q, cos, sin)
    return _rotated(rope_forward, q, k, fitted, dtype, variant.keeps_order)


def _backward(
    form: _Form, grads: Sequence[Tensor | None], tables: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """The gradient of a rotation is a rotation of the gradient. Liger takes two, so a single one is given twice."""
    (variant, width, heads), wanted = form, [grad for grad in grads if grad is not None]
    fitted = _Fitted(tables[2], tables[3], width, heads)
    turned = _rotated(rope_backward, wanted[0], wanted[-1], fitted, wanted[0].dtype, variant.keeps_order)
    return [gradient.to(dtypes[0]) for gradient in turned[: len(wanted)]]


def _formula(form: _Form, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Tensor]:
    return [y for y in reference.compute(form[0], *xs, *tables[:2]) if y is not None]


_rotate = differentiable_linear(_forward, _backward, _formula)
