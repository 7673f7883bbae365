"""LayerNorm in plain PyTorch, as models write it: it defines the right result."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, variant: str) -> Tensor:
    """Normalise rows (Ba et al. 2016, arXiv:1607.06450), rounding as the variant does.

    Args:
        x: ``(..., width)``, floating.
        weight: ``(width,)``, floating.
        bias: ``(width,)``, floating; ``None`` for none.
        eps: Added to the variance.
        variant: ``"torch"`` is `torch.nn.functional.layer_norm`. ``"cohere"`` computes in float32 (float64 if *x* is)
            up to the product with the weight, subtracts the mean twice, as Cohere does, and has no bias.

    Returns:
        A tensor like *x*.
    """
    if variant == "torch":
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (weight.to(wide.dtype) * ((wide - mean) * torch.rsqrt(variance + eps))).to(x.dtype)
