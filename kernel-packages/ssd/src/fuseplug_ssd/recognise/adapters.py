"""How the function of a model is called, put into the signature of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseplug import Adapter, Compute

_NOT_COMPUTED = ("z", "seq_idx", "cu_seqlens")
"""Keywords that ask for more: a gate, or where packed sequences begin."""


@dataclass(frozen=True)
class ChunkScanAdapter(Adapter):
    """Calls the recurrence in the place of a function that a method looks up."""

    variant = "mamba2"

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a function with the parameters that those of models have.

        Shapes are those of `fuseplug_ssd.reference.ssd`. A call is the original's if it asks for a gate or for packed
        sequences, or has tensors of other shapes or without tokens; or if it is compiled, because the original then has
        fewer operations.
        """

        def scan(
            hidden_states: Tensor,
            dt: Tensor,
            A: Tensor,
            B: Tensor,
            C: Tensor,
            chunk_size: int,
            D: Tensor | None = None,
            dt_bias: Tensor | None = None,
            initial_states: Tensor | None = None,
            dt_softplus: bool = False,
            dt_limit: tuple[float, float] = (0.0, float("inf")),
            return_final_states: bool = False,
            **kwargs: Any,
        ) -> Any:
            del chunk_size  # how it is computed
            more = bool(kwargs) and any(kwargs.get(name) is not None for name in _NOT_COMPUTED)
            batch, tokens, heads, width = hidden_states.shape
            groups, states = B.shape[2:]
            fits = (
                dt.shape == (batch, tokens, heads)
                and A.shape == (heads,)
                and C.shape == B.shape == (batch, tokens, groups, states)
                and all(x is None or x.shape == (heads,) for x in (D, dt_bias))
                and (initial_states is None or initial_states.shape == (batch, heads, width, states))
            )
            if more or not tokens or not fits or heads % groups or torch.compiler.is_compiling():
                return NotImplemented
            result, last = compute(
                hidden_states, dt, A, B, C, D, dt_bias, initial_states, dt_softplus=dt_softplus, dt_limit=dt_limit
            )
            return (result, last) if return_final_states else result

        return scan
