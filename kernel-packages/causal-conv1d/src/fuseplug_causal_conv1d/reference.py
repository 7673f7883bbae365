"""A short causal convolution in plain PyTorch, and a table of the activations that follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from fuseplug_backends.activations import ACTIVATIONS

__all__ = ["VARIANTS", "Variant", "causal_conv1d", "compute"]


@dataclass(frozen=True)
class Variant:
    """The activation of the sums.

    Attributes:
        name: Its key in `VARIANTS`.
        activation: A key of `fuseplug_backends.activations.ACTIVATIONS`; ``None`` for none.
    """

    name: str
    activation: str | None

    def activate(self, sums: Tensor) -> Tensor:
        """The activation of *sums*, in their dtype."""
        return sums if self.activation is None else ACTIVATIONS[self.activation].function(sums, 1.0)


VARIANTS = {variant.name: variant for variant in (Variant("silu", "silu"), Variant("identity", None))}
"""Every variant by name, the likely ones first."""


def compute(variant: Variant, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`causal_conv1d` for checked arguments.

    Args:
        variant: The variant.
        x: ``(batch, channels, tokens)``, floating.
        weight: ``(channels, width)``, floating.
        bias: ``(channels,)`` in the dtype of *weight*, or ``None``.

    Returns:
        ``(batch, channels, tokens)``, in the dtype of *x*.

    Raises:
        RuntimeError: If torch cannot convolve these, for example because *bias* has another dtype than *weight*.
    """
    channels, width = weight.shape
    sums = functional.conv1d(x.to(weight.dtype), weight.unsqueeze(1), bias, padding=width - 1, groups=channels)
    return variant.activate(sums[:, :, : x.shape[-1]]).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    variant: str = "silu",
    compute: Callable[[Variant, Tensor, Tensor, Tensor | None], Tensor] = compute,
) -> Tensor:
    """A causal convolution of each channel with a few taps of its own, and an activation.

    ``y[b, c, t] = activation(bias[c] + Σ_j weight[c, j] · x[b, c, t - width + 1 + j])``, where x is zero before its
    first token. The sum, and then the activation, are computed in the dtype of *weight* and rounded to it.

    Args:
        x: ``(batch, channels, tokens)``, floating, of any strides; in models usually the transposed view of
            ``(batch, tokens, channels)``.
        weight: ``(channels, width)``, floating.
        bias: ``(channels,)`` in the dtype of *weight*, or ``None``.
        variant: A key of `VARIANTS`.
        compute: A backend's function, called with the row of `VARIANTS` and the checked arguments.

    Returns:
        ``(batch, channels, tokens)``, in the dtype of *x*.

    Raises:
        ValueError: If the variant is unknown, or a shape does not fit.
    """
    return compute(check(x, weight, bias, variant), x, weight, bias)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, variant: str) -> Variant:
    """Return the row of *variant*, or raise the `ValueError` that says what does not fit."""
    row = VARIANTS.get(variant)
    if row is None:
        raise ValueError(f"unknown variant of a causal convolution {variant!r}; known: {', '.join(VARIANTS)}")
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; (batch, channels, tokens) is expected")
    channels = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != channels or not weight.shape[1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; ({channels}, width) is expected: x has {channels} channels"
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; ({channels},) is expected: x has {channels} channels")
    return row


def later(x: Tensor, places: int, dim: int) -> Tensor:
    """*x*, shifted by *places* towards the end of *dim*: zeros come first, and the last elements are dropped."""
    return functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (places, 0)).narrow(dim, 0, x.shape[dim])
