"""The calls for which something was verified."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .watch import NOTHING, Call, Extra, Route, Watch

Dtypes = tuple[torch.dtype | None, ...]
"""The dtypes that occur together in one call."""


@dataclass(frozen=True)
class VerifiedCalls:
    """The calls for which it was found what an original computes.

    Attributes:
        calls: The ways in which it was called.
        main: Which argument is the main input, the module counted.
        typed: The tensors whose dtypes count: arguments by number, others by where they are below the module.
        dtypes: Their dtypes, in each combination that was verified.
        watch: What else must be as it was.
        extra: What becomes of keyword arguments that the original has no parameters for.
    """

    calls: tuple[Call, ...]
    main: int
    typed: tuple[int | Route, ...]
    dtypes: tuple[Dtypes, ...]
    watch: Watch = NOTHING
    extra: Extra = "original"
