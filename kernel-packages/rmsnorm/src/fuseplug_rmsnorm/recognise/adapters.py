"""The adapter: it calls the kernel, in the signature of the reference, with the values that the module holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute


@dataclass(frozen=True)
class NormAdapter(Adapter):
    """Calls an RMSNorm with the values that the module holds at the time of the call.

    Attributes:
        variant: A key of `fuseplug_rmsnorm.reference.VARIANTS`.
        weight: Name of the weight; ``None`` for a norm that has or uses none.
        eps: Name of the epsilon, or the number that is written in the code. ``None``, here or under that name, stands
            for the machine epsilon of the dtype that the norm computes in.
        group_size: Name of the attribute that says how many neighbours are normalised together.
        groups: Name of the attribute that says into how many groups the row is cut.
        gated: Whether the forward takes a gate.
        single: Whether the weight is one number for the whole row.
    """

    variant: str
    weight: str | None
    eps: str | float | None
    group_size: str | None = None
    groups: str | None = None
    gated: bool = False
    single: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The weight, the epsilon and the size or number of groups."""
        eps = self.eps if isinstance(self.eps, str) else None
        return tuple(name for name in (self.weight, eps, self.group_size, self.groups) if name is not None)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states)``, or ``forward(module, hidden_states, gate)`` for a gated module.

        Both tensors are ``(..., hidden)``, of any floating dtype. Result and errors are those of `reference.rms_norm`.
        """
        if self.gated or self.group_size or self.groups or self.single:
            return self._bind_any(compute)
        variant, weight, epsilon = self.variant, self.weight, self.eps
        named = isinstance(epsilon, str)

        # Lean, because for a single token the caller waits for this function.
        def forward(module: nn.Module, hidden_states: Tensor) -> Any:
            eps = getattr(module, epsilon) if named else epsilon  # type: ignore[arg-type]
            if eps is None:
                eps = _machine_epsilon(hidden_states)
            scale = None if weight is None else getattr(module, weight)
            return compute(hidden_states, scale, eps, variant=variant)

        return forward

    def _bind_any(self, compute: Compute) -> Callable[..., Any]:
        adapter = self

        def gated(module: nn.Module, hidden_states: Tensor, gate: Tensor | None = None) -> Any:
            eps = getattr(module, adapter.eps) if isinstance(adapter.eps, str) else adapter.eps
            return compute(
                hidden_states,
                adapter._scale(module, hidden_states),
                _machine_epsilon(hidden_states) if eps is None else eps,
                variant=adapter.variant,
                gate=gate,
                group_size=adapter._neighbours(module, hidden_states),
            )

        def ungated(module: nn.Module, hidden_states: Tensor) -> Any:
            return gated(module, hidden_states)

        return gated if self.gated else ungated

    def _scale(self, module: nn.Module, hidden_states: Tensor) -> Tensor | None:
        if self.weight is None:
            return None
        scale: Tensor = getattr(module, self.weight)
        return scale.expand(hidden_states.shape[-1:]) if self.single else scale

    def _neighbours(self, module: nn.Module, hidden_states: Tensor) -> int | None:
        if self.groups is not None:
            return hidden_states.shape[-1] // int(getattr(module, self.groups))
        return None if self.group_size is None else getattr(module, self.group_size)


def _machine_epsilon(hidden_states: Tensor) -> float:
    """The epsilon that ``nn.RMSNorm`` uses for an eps of ``None``: that of the dtype it computes in."""
    return torch.finfo(torch.promote_types(hidden_states.dtype, torch.float32)).eps
