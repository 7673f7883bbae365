"""The loss on GPUs, for a chunk of tokens at a time: torch computes the matmuls, and Triton everything between them.

For each chunk, a matmul writes the logits. One program reads them, and reads them again to put their gradient in their
place. From that, two matmuls make the gradients of hidden and weight. Nothing waits for the device.
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

    The result is the reference's up to rounding; everything between the matmuls is computed in float32. A label outside
    of the vocabulary makes the loss NaN, because an error would have to wait for the device.

    The reference computes calls with dtypes other than float16, bfloat16 and float32, with empty tensors or with two
    tanh steps, and calls for tracers, functorch transforms and tensor subclasses. It also computes a backward that is
    to be differentiated again.
    """
    return recorded.compute(_OPERATIONS, loss, hidden, weight, labels, bias)


def compute_tokens(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tokens:
    """`fuseplug_linear_cross_entropy.reference.linear_logprob` on a GPU: the same arguments, result and errors.

    All else is as for `linear_cross_entropy`.
    """
    return recorded.compute_tokens(_OPERATIONS, loss, hidden, weight, labels, bias)


linear_cross_entropy = computed_by(compute, reference.linear_cross_entropy)
linear_logprob = computed_by(compute_tokens, reference.linear_logprob)
