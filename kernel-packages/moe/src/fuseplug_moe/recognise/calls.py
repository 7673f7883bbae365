"""Which calls of experts are left to the original, and what the others compute beside the kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fuseplug_backends.dtypes import MODEL_DTYPES
from fuseplug_backends.tracing import is_traced

PLAIN = (Tensor, nn.Parameter)
"""The types of the tensors that kernels are given."""


def is_the_originals(x: Tensor) -> bool:
    """Whether a call is the original's.

    Tracers follow a list of experts with breaks only; and without a token it looks at no weight, and leaves each
    without a gradient.
    """
    return is_traced() or not x.numel()


def passed(experts: range, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What the experts with the numbers *experts* add: the rows as they are, weighted.

    *x* is ``(tokens, hidden)``, *index* and *weights* are ``(tokens, k)``; the result is like *x*.
    """
    others = (index < experts.start) | (index >= experts.stop)
    wide = torch.promote_types(x.dtype, weights.dtype)  # in which a row is weighted, and two weights are added
    return (x * weights.masked_fill(others, 0).sum(-1, keepdim=True, dtype=wide)).to(x.dtype)


def narrowed(x: Tensor, matrix: Tensor) -> Tensor:
    """*matrix*, of any shape, as a matrix product takes it beside *x*: under autocast, in the dtype of that.

    The kernels compute in the dtype of the matrices, so these decide.
    """
    kind = x.device.type
    if matrix.dtype not in MODEL_DTYPES or not torch.is_autocast_enabled(kind):
        return matrix
    return matrix.to(torch.get_autocast_dtype(kind))
