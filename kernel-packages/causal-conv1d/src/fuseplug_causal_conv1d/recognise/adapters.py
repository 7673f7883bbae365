"""How the function of a model is called, put into the signature of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fuseplug import Adapter, Compute

_PACKED = ("seq_idx", "cu_seqlens")
"""Keywords that say where packed sequences begin. A function that computes without them raises."""


@dataclass(frozen=True)
class ConvolutionAdapter(Adapter):
    """Calls a causal convolution in the place of a function that a method looks up.

    Attributes:
        variant: A key of `fuseplug_causal_conv1d.reference.VARIANTS`.
    """

    variant: str

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``function(hidden_states, weight, bias=None, activation=None, **kwargs)``.

        Shapes and errors are those of `fuseplug_causal_conv1d.reference.causal_conv1d`. Which activation a name stands
        for is verified for each name, so it is not looked up here. A call with packed sequences is the original's.
        """
        variant = self.variant

        def convolve(
            hidden_states: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            activation: str | None = None,
            **kwargs: Any,
        ) -> Any:
            del activation
            if kwargs and any(kwargs.get(name) is not None for name in _PACKED):
                return NotImplemented
            return compute(hidden_states, weight, bias, variant=variant)

        return convolve
