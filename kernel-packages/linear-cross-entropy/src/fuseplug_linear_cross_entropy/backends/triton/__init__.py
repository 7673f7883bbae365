"""The loss on GPUs: matmuls by torch, and all between them by Triton, for some tokens at a time.

What is done for each chunk of tokens: a matmul writes its logits; one program reads them, and reads them again to put
their gradient in their place; two matmuls make the gradients of hidden and weight of it. Nothing waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import transparent

from ... import reference
from ...reference import Loss, Tokens
from .. import recorded
from .launches import differentiate, keeps, measure, measure_and_differentiate, scale

_OPERATIONS = recorded.Operations(measure, differentiate, measure_and_differentiate, scale, transparent, keeps)


def compute(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor | Tokens:
    """`fuseplug_linear_cross_entropy.reference.linear_cross_entropy` on a GPU: the same arguments, result and errors.

    The result is the reference's up to rounding: all between the matmuls is computed in float32. A label outside of
    the vocabulary makes the loss NaN, because an error would be waited for.

    For that call it is the reference: of other dtypes than float16, bfloat16 and float32; of empty tensors; of two tanh
    one after the other; to tracers, functorch transforms and subclasses. So is a backward that is to be differentiated
    again.
    """
    return recorded.compute(_OPERATIONS, loss, hidden, weight, labels, bias)


def compute_tokens(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tokens:
    """`fuseplug_linear_cross_entropy.reference.linear_logprob` on a GPU: the same arguments, result and errors.

    All else is as for `linear_cross_entropy`.
    """
    return recorded.compute_tokens(_OPERATIONS, loss, hidden, weight, labels, bias)


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)
linear_logprob = computed_by(compute_tokens, reference.linear_logprob)
