"""Tells which process of a distributed run this is."""

from __future__ import annotations

import os

from torch import distributed


def rank() -> int:
    """The rank of this process; 0 if it is alone."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    variable = os.environ.get("RANK", "")
    return int(variable) if variable.isdecimal() else 0
