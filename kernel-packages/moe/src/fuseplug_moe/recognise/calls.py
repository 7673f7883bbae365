"""Which calls of experts the original computes, and what other calls compute beside the kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuseplug_backends.dtypes import MODEL_DTYPES
from fuseplug_backends.tracing import is_traced

PLAIN = (Tensor, nn.Parameter)
"""The types of the tensors that kernels are given."""


def is_the_originals(x: Tensor) -> bool:
    """Whether the original computes a call.

    Tracers can follow a list of experts only with breaks. And without a token, the original looks at no weight, and
    leaves every weight without a gradient.
    """
    return is_traced() or not x.numel()


def passed(experts: range, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the experts numbered *experts*, which return their rows unchanged.

    *x* is ``(tokens, hidden)``, *index* and *weights* are ``(tokens, k)``; the result is like *x*.
    """
    others = (index < experts.start) | (index >= experts.stop)
    wide = torch.promote_types(x.dtype, weights.dtype)  # the dtype in which rows are weighted and weights are added
    return (x * weights.masked_fill(others, 0).sum(-1, keepdim=True, dtype=wide)).to(x.dtype)


def narrowed(x: Tensor, matrix: Tensor) -> Tensor:
    """*matrix*, of any shape, as a matrix product with *x* takes it: under autocast, in autocast's dtype.

    The kernels compute in the dtype of the matrices, so this dtype decides.
    """
    kind = x.device.type
    if matrix.dtype not in MODEL_DTYPES or not torch.is_autocast_enabled(kind):
        return matrix
    return matrix.to(torch.get_autocast_dtype(kind))
