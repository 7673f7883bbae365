"""Adapters from the signatures of models' functions to the signature of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug import Adapter, Compute

_NOT_COMPUTED = ("z", "seq_idx", "cu_seqlens")
"""Keywords that ask for more than the kernel computes: a gate, or packed sequences."""


@dataclass(frozen=True)
class ChunkScanAdapter(Adapter):
    """Calls the kernel in the place of a chunk scan that a method looks up."""

    variant = "mamba2"
    is_step: ClassVar[bool] = False

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a function with the parameters of models' own chunk scans.

        Shapes are those of `fuseplug_ssd.reference.ssd`. A call goes to the original if it asks for a gate or for
        packed sequences, or if its tensors have other shapes or no tokens.
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
            del chunk_size  # it chooses only how the original computes
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
            if more or not tokens or not fits or heads % groups:
                return NotImplemented
            # A model then writes the last states into its cache, but the backward needs the initial states: the
            # original keeps a copy of them, too.
            first = None if initial_states is None else initial_states.clone()
            y, last = compute(hidden_states, dt, A, B, C, D, dt_bias, first, dt_softplus=dt_softplus, dt_limit=dt_limit)
            return (y, last) if return_final_states else y

        return scan


@dataclass(frozen=True)
class StepAdapter(Adapter):
    """Calls the kernel for one token, in the place of a function for decoding that writes into the states."""

    variant = "mamba2"
    is_step: ClassVar[bool] = True

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a function with the parameters of models' own functions for one token.

        Its *state* is ``(batch, heads, width, states)``; *hidden_states*, *dt* and *z* are ``(batch, heads, width)``, A
        is ``(heads, width, states)``, and D and *dt_bias* are ``(heads, width)``. B and C are those of
        `fuseplug_ssd.reference.ssd`, without the dimension of the tokens. The function writes into *state* last, when
        nothing can raise any more. A call goes to the original if dt, A, D or *dt_bias* differs within a head.
        """

        def step(
            state: Tensor,
            hidden_states: Tensor,
            dt: Tensor,
            A: Tensor,
            B: Tensor,
            C: Tensor,
            D: Tensor | None = None,
            dt_bias: Tensor | None = None,
            dt_softplus: bool = False,
            z: Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            del kwargs
            fits = z is None or z.shape == hidden_states.shape
            of_heads = [_of_heads(tensor, rank) for tensor, rank in ((dt, 2), (A, 1), (D, 1), (dt_bias, 1))]
            if not fits or any(tensor is NotImplemented for tensor in of_heads):
                return NotImplemented
            dt, A, D, dt_bias = of_heads
            x, dt, B, C = (tensor.unsqueeze(1) for tensor in (hidden_states, dt, B, C))
            limit = (-math.inf, math.inf)
            y, last = compute(x, dt, A, B, C, D, dt_bias, state, dt_softplus=dt_softplus, dt_limit=limit)
            y = y.squeeze(1)
            result = (y if z is None else y * functional.silu(z.to(y.dtype))).to(hidden_states.dtype)
            state.copy_(last)
            return result

        return step


def _of_heads(tensor: Tensor | None, rank: int) -> Any:
    """The first *rank* dimensions of *tensor*, if it is constant along the others; else ``NotImplemented``.

    Models make such a tensor by `expand`. Its strides show this, so its values need not be compared.
    """
    if tensor is None:
        return None
    first = tensor
    while first.dim() > rank:
        first = first.select(-1, 0)
    expanded = first.view(*first.shape, *[1] * (tensor.dim() - rank)).expand_as(tensor)
    return first if tensor.stride() == expanded.stride() or torch.equal(tensor, expanded) else NotImplemented
