"""Limits on values: they are looked at where a reference computes, as fake tensors have none."""

from __future__ import annotations

from torch import Tensor

from ..errors import ContractError


def require_values(holds: bool | Tensor, op: str, argument: str, asked: str, found: object, source: str) -> None:
    """Raise `ContractError` unless it *holds*: an NPU would read or write elsewhere, and say nothing."""
    if not holds:
        raise ContractError(op, argument, asked, str(found), source, documented=False)
