"""RoPE by one launch: which calls it serves, and how they are differentiated."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiable_linear, offsets_fit, recording, transparent

from ... import reference
from .cutting import shared_dims
from .launch import rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...reference import Variant


def compute(variant: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """`fuseplug_rope.reference.rope`, fused: the same arguments, result and errors.

    One launch computes q and k, forward and backward. It reads and writes each of them once, in any layout. It computes
    in float32 and rounds once; results lie in memory as the reference's do. A backward needs only the tables. Gradients
    of tables, and of gradients, are those of the reference.

    The reference computes calls that the launch does not serve: dtypes other than float16, bfloat16 and float32;
    tensors that are empty, or have more than four dimensions; rows that are not one piece of memory, if results keep
    the memory order; a k that differs from q in more than the number of heads and the width; tables that have a row for
    everything, or that would enlarge the result; an odd number of elements to rotate.
    """
    if not _is_served(variant, q, k, cos, sin):
        return by_reference(reference.compute, variant, q, k, cos, sin)
    q_out, *k_out = _rotate(variant, (q,) if k is None else (q, k), (cos, sin))
    return q_out, k_out[0] if k_out else None


rope = computed_by(compute, reference.rope)


def _rotated(variant: Variant, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> Any:
    q, k = xs if len(xs) == 2 else (xs[0], None)
    q_dtype = k_dtype = reference.result_dtype(variant, q, q, *tables)
    if k is not None and k.dtype is not q.dtype:
        k_dtype = reference.result_dtype(variant, k, q, *tables)
    return rotate(q, k, *tables, q_dtype, k_dtype, variant.name, False)


def _rotated_back(
    variant: Variant, grads: Sequence[Tensor | None], tables: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> Any:
    """The gradient of a rotation is a rotation of the gradient."""
    wanted = [(grad, dtype) for grad, dtype in zip(grads, dtypes, strict=True) if grad is not None]
    (first, first_dtype), (last, last_dtype) = wanted[0], wanted[-1]
    return rotate(first, last if len(wanted) > 1 else None, *tables, first_dtype, last_dtype, variant.name, True)


def _formulas(variant: Variant, xs: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Tensor]:
    q, k = xs if len(xs) == 2 else (xs[0], None)
    return [y for y in reference.compute(variant, q, k, *tables) if y is not None]


_rotate = differentiable_linear(_rotated, _rotated_back, _formulas)


def _is_served(variant: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> bool:
    # Finding the dimensions takes longer than generating one token.
    dims = shared_dims if torch.compiler.is_compiling() else _remembered
    return (
        transparent(q, k, cos, sin)
        and have_model_dtypes(q, k, cos, sin)
        and variant.width_rotated(cos) % 2 == 0
        and (not variant.keeps_order or q.stride(-1) == (1 if k is None else k.stride(-1)) == 1)
        and (offsets_fit(cos, 1) and offsets_fit(sin, 1))
        and bool(dims(q.shape, q.shape if k is None else k.shape, cos.shape, sin.shape))
        # A backward that takes the gradients of a formula cannot be traced.
        and not (torch.compiler.is_compiling() and recording(cos, sin))
        and not variant.is_cast(q)
    )


_remembered = functools.lru_cache(maxsize=1024)(shared_dims)
