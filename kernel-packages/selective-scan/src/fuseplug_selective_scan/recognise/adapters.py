"""Adapters from the signatures of models' functions to the signature of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fuseplug import Adapter, Compute

_PACKED = ("seq_idx", "cu_seqlens")
"""Keywords that say where packed sequences begin. A function that cannot keep sequences apart raises if it gets one."""

_FEWEST = 8
"""Tokens. With fewer, the original is as fast, because starting operations takes all of the kernel's time."""


@dataclass(frozen=True)
class ScanAdapter(Adapter):
    """Calls the kernel in the place of a selective scan that a method looks up."""

    variant = "s6"
    is_step: ClassVar[bool] = False

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a function with the parameters of models' own scans.

        Shapes and errors are those of `fuseplug_selective_scan.reference.selective_scan`. A call goes to the original
        if it has packed sequences, groups of B or C, or fewer than `_FEWEST` tokens.
        """

        def scan(
            hidden_states: Tensor,
            dt: Tensor,
            A: Tensor,
            B: Tensor,
            C: Tensor,
            D: Tensor | None = None,
            z: Tensor | None = None,
            delta_bias: Tensor | None = None,
            delta_softplus: bool = False,
            return_last_state: bool = False,
            use_mambapy: bool = False,
            use_associative_scan: bool = False,
            **kwargs: Any,
        ) -> Any:
            del use_mambapy, use_associative_scan  # they choose only how the original computes
            packed = bool(kwargs) and any(kwargs.get(name) is not None for name in _PACKED)
            batch, channels, tokens = hidden_states.shape
            shape = (batch, A.shape[-1], tokens)
            fits = A.shape[0] == channels and dt.shape == hidden_states.shape and B.shape == C.shape == shape
            if packed or tokens < _FEWEST or not fits:
                return NotImplemented
            result, state = compute(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus=delta_softplus)
            return (result, state) if return_last_state else result

        return scan


@dataclass(frozen=True)
class StepAdapter(Adapter):
    """Calls the kernel for one token, in the place of a function for decoding that writes into the state."""

    variant = "s6"
    is_step: ClassVar[bool] = True

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a function with the parameters of models' own functions for one token.

        Its *state* is ``(batch, channels, states)``; other shapes are those of
        `fuseplug_selective_scan.reference.selective_scan`, without the dimension of the tokens. The function writes
        into *state* last, when nothing can raise any more.
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
            x, dt, B, C = (tensor.unsqueeze(-1) for tensor in (hidden_states, dt, B, C))
            gate = None if z is None else z.unsqueeze(-1)
            y, last = compute(x, dt, A, B, C, D, gate, dt_bias, state, delta_softplus=dt_softplus)
            result = y.squeeze(-1).to(hidden_states.dtype)
            state.copy_(last)
            return result

        return step
