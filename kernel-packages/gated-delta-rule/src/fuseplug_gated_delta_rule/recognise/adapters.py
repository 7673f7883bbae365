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
class DeltaRuleAdapter(Adapter):
    """Calls a gated delta rule in the place of a function that a method looks up.

    Attributes:
        variant: A key of `fuseplug_gated_delta_rule.reference.VARIANTS`.
        is_step: Whether that function is for a few tokens, as in decoding.
    """

    variant: str
    is_step: bool = False

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a function with the parameters that those of models have, but for the size of chunks.

        Shapes and errors are those of `fuseplug_gated_delta_rule.reference.gated_delta_rule`. A call with packed
        sequences is the original's, and so is one with another number of heads in g or beta than in the values.
        """
        variant = self.variant

        def rule(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            g: Tensor,
            beta: Tensor,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            **kwargs: Any,
        ) -> Any:
            packed = bool(kwargs) and any(kwargs.get(name) is not None for name in _PACKED)
            if packed or not (g.shape[:3] == beta.shape == value.shape[:3]):
                return NotImplemented
            result, state = compute(
                query, key, value, g, beta, initial_state, variant=variant, normalised=use_qk_l2norm_in_kernel
            )
            return result, state if output_final_state else None

        return rule
