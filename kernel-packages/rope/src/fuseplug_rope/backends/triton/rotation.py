"""RoPE by the launch: which calls are served, and how they are differentiated."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import differentiated_again, offsets_fit, recording, transparent, vjp

from ... import reference
from .cutting import shared_dims
from .launch import rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...reference import Variant


def compute(how: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
    """`fuseplug_rope.reference.rope`, fused: the same arguments, result and errors.

    One launch for q and k, forward and backward, which reads each of them once and writes it once, in any layout. It
    computes in float32 and rounds once; results lie in memory as the reference's. A backward needs the tables alone.
    Gradients of tables, and of gradients, are those of the reference.

    What is not served is computed by the reference: other dtypes than float16, bfloat16 and float32; tensors of more
    than four dimensions, or empty; a k that differs from q in more than the number of heads and the width; tables that
    have a row for everything, or that would enlarge the result; an odd number of elements to rotate.
    """
    if not _is_served(how, q, k, cos, sin):
        return by_reference(reference.compute, how, q, k, cos, sin)
    run = _Rotation.apply if recording(q, k, cos, sin) else _rotated
    q_out, *k_out = run(how.name, q, k, cos, sin)
    return q_out, k_out[0] if k_out else None


rope = computed_by(compute, reference.rope)


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is a rotation of the gradient: the tables are all that is kept for it."""

    @staticmethod
    def forward(ctx: Any, variant: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if not torch.compiler.is_compiling():
            # A result that nobody used has no gradient, and neither then has what it was made from.
            ctx.set_materialize_grads(False)
        found = tuple(_rotated(variant, q, k, cos, sin))
        needs = ctx.needs_input_grad[1:]
        ctx.shapes = [y.shape for y in found]
        ctx.variant, ctx.dtypes = variant, [x.dtype for x in (q, k) if x is not None]
        ctx.save_for_backward(cos, sin, *((q, k) if any(needs[2:]) else ()))
        ctx.used = [any(needs[2:]) or need for need in needs[: len(found)]]
        if not all(ctx.used):
            ctx.mark_non_differentiable(*[y for y, used in zip(found, ctx.used, strict=True) if not used])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # Looked at once: under activation checkpointing they are computed for that, and then forgotten.
        cos, sin, *xs = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[1:])
        needs[: len(grads)] = [need and grad is not None for need, grad in zip(needs, grads, strict=False)]
        if differentiated_again() or not transparent(cos, sin, *grads):
            return None, *_by_formula(ctx, needs, grads, cos, sin, xs)
        found: list[Tensor | None] = [None] * 4
        wanted = [number for number in range(len(grads)) if needs[number]]
        if wanted:
            first, last = wanted[0], wanted[-1]
            results = rotate(
                *(grads[first], grads[last] if last > first else None, cos, sin),
                *(ctx.dtypes[first], ctx.dtypes[last], ctx.variant, True),
            )
            for number, result in zip(wanted, results, strict=True):
                found[number] = result
        if any(needs[2:]):
            found[2:] = _by_formula(ctx, (False, False, *needs[2:]), grads, cos, sin, xs)[2:]
        return None, *found


def _rotated(variant: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
    how = reference.VARIANTS[variant]
    q_dtype = reference.result_dtype(how, q, q, cos, sin)
    k_dtype = q_dtype if k is None else reference.result_dtype(how, k, q, cos, sin)
    found: Sequence[Tensor] = rotate(q, k, cos, sin, q_dtype, k_dtype, variant, False)
    return found


def _by_formula(
    ctx: Any, needs: Sequence[bool], grads: Sequence[Tensor | None], cos: Tensor, sin: Tensor, xs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of q, k, cos and sin that *needs* names, by the reference."""
    if not xs:
        # A rotation is linear in q and k: its gradient does not depend on their values.
        xs = [cos.new_zeros(shape, dtype=dtype) for shape, dtype in zip(ctx.shapes, ctx.dtypes, strict=True)]
    q, k = xs if len(xs) == 2 else (*xs, None)

    asked = [used and grad is not None for grad, used in zip(grads, ctx.used, strict=True)]

    def formula(*tensors: Any) -> list[Tensor]:
        found = reference.compute(reference.VARIANTS[ctx.variant], *tensors)
        return [y for y, ask in zip(found, asked, strict=False) if ask and y is not None]

    given = [grad for grad, ask in zip(grads, asked, strict=True) if ask and grad is not None]
    return vjp(formula, (q, k, cos, sin), needs, given, create_graph=differentiated_again())


def _is_served(how: Variant, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> bool:
    # One token is generated in less time than it takes to find the dimensions.
    dims = shared_dims if torch.compiler.is_compiling() else _remembered
    return (
        transparent(q, k, cos, sin)
        and have_model_dtypes(q, k, cos, sin)
        and (how.table == "half" or cos.shape[-1] % 2 == 0)
        and (offsets_fit(cos, 1) and offsets_fit(sin, 1))
        and bool(dims(q.shape, q.shape if k is None else k.shape, cos.shape, sin.shape))
        # What takes a formula's gradients in the backward cannot be traced.
        and not (torch.compiler.is_compiling() and recording(cos, sin))
        # Of all forms autocast changes the one that takes a sum.
        and not (how.form == "matrix" and torch.is_autocast_enabled(q.device.type))
    )


_remembered = functools.lru_cache(maxsize=1024)(shared_dims)
