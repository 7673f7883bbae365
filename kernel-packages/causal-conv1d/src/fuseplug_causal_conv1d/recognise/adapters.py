"""Turns calls of a model's function into calls with the signature of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseplug import Adapter, Compute

_PACKED = ("seq_idx", "cu_seqlens")
"""Keywords that say where packed sequences begin. A model's function that cannot keep these apart raises an error."""


@dataclass(frozen=True)
class ConvolutionAdapter(Adapter):
    """Calls a causal convolution in the place of a function that a method looks up.

    Attributes:
        variant: A key of `fuseplug_causal_conv1d.reference.VARIANTS`.
        packed: Whether it computes packed sequences, each by itself.
    """

    variant: str
    packed: bool = False

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``function(hidden_states, weight, bias=None, activation=None, **kwargs)``.

        Shapes and errors are those of `fuseplug_causal_conv1d.reference.causal_conv1d`. Which activation a name stands
        for is verified for each name, so the function does not look it up. The original computes a call with packed
        sequences, unless *packed* is true and ``seq_idx`` alone numbers the sequences.
        """
        variant, packed = self.variant, self.packed

        def convolve(
            hidden_states: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            activation: str | None = None,
            **kwargs: Any,
        ) -> Any:
            del activation
            numbers, bounds = (kwargs.get(name) for name in _PACKED) if kwargs else (None, None)
            if numbers is None and bounds is None:
                return compute(hidden_states, weight, bias, variant=variant)
            batch, _, tokens = hidden_states.shape
            says = isinstance(numbers, Tensor) and numbers.shape == (1, tokens) and bounds is None
            if not (packed and says and batch == 1):
                return NotImplemented
            lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
            parts = torch.split(hidden_states, lengths, 2)
            return torch.cat([compute(part, weight, bias, variant=variant) for part in parts], 2)

        return convolve
