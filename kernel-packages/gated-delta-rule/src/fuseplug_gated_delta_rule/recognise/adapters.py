"""Turns calls of a model's function into calls with the signature of the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseplug import Adapter, Compute

_PACKED = ("seq_idx", "cu_seqlens")
"""Keywords that say where packed sequences begin. A model's function that cannot keep these apart raises an error."""


@dataclass(frozen=True)
class DeltaRuleAdapter(Adapter):
    """Calls a gated delta rule in the place of a function that a method looks up.

    Attributes:
        variant: A key of `fuseplug_gated_delta_rule.reference.VARIANTS`.
        is_step: Whether the function is for a few tokens, as in decoding.
        packed: Whether it computes packed sequences, each by itself.
    """

    variant: str
    is_step: bool = False
    packed: bool = False

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a function with the parameters of the models' functions, except for the size of chunks.

        Shapes and errors are those of `fuseplug_gated_delta_rule.reference.gated_delta_rule`. The original computes a
        call in which g or beta has another number of heads than the values. It also computes a call with packed
        sequences, unless *packed* is true, ``seq_idx`` numbers them, ``cu_seqlens`` agrees or is missing, and there are
        no states.
        """
        variant, packed = self.variant, self.packed

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
            if not g.shape[:3] == beta.shape == value.shape[:3]:
                return NotImplemented
            if kwargs and any(kwargs.get(name) is not None for name in _PACKED):
                lengths = _lengths(kwargs, query) if packed and initial_state is None and not output_final_state else []
                if not lengths:
                    return NotImplemented
                parts = zip(*(torch.split(x, lengths, 1) for x in (query, key, value, g, beta)), strict=True)
                how = {"variant": variant, "normalised": use_qk_l2norm_in_kernel}
                return torch.cat([compute(*part, None, **how)[0] for part in parts], 1), None
            result, state = compute(
                query, key, value, g, beta, initial_state, variant=variant, normalised=use_qk_l2norm_in_kernel
            )
            return result, state if output_final_state else None

        return rule


def _lengths(keywords: Mapping[str, Any], x: Tensor) -> list[int]:
    """How many tokens of *x*, ``(1, tokens, ...)``, each packed sequence has; empty if *keywords* do not say it."""
    numbers, bounds = (keywords.get(name) for name in _PACKED)
    if not isinstance(numbers, Tensor) or numbers.shape != (1, x.shape[1]) or x.shape[0] != 1:
        return []
    lengths: list[int] = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
    agreed = [0, *itertools.accumulate(lengths)]
    return lengths if bounds is None or (isinstance(bounds, Tensor) and bounds.tolist() == agreed) else []
