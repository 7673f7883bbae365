"""Limits on values. References check them when they compute, because fake tensors have no values."""

from __future__ import annotations

from torch import Tensor

from ..errors import ContractError


def require_values(holds: bool | Tensor, op: str, argument: str, asked: str, found: object, source: str) -> None:
    """Raise `ContractError` unless *holds*: an NPU would read or write elsewhere without an error."""
    if not holds:
        raise ContractError(op, argument, asked, str(found), source, documented=False)
