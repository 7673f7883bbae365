"""The calls for which something was verified."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from .gains import EVERY_SIZE, Gains
from .watch import NOTHING, ById, Call, Extra, Route, Watch

Dtypes = tuple[torch.dtype | None, ...]
"""The dtypes that occur together in one call."""


@dataclass(frozen=True)
class Accepts:
    """The calls that were verified; every other goes to the original.

    Attributes:
        calls: The ways in which it was called.
        main: Which argument is the main input, the module counted.
        typed: The tensors whose dtypes count: arguments by number, others by where they are below the module.
        dtypes: Their dtypes, in each combination that was verified.
        watch: What else must be as it was.
        extra: What becomes of keyword arguments that the original has no parameters for.
        space: For a function target, where the name is looked up, if it is known.
        scope: What must be entered, as in `fuseplug.patching.scoping`; ``None``: nothing.
        gains: From which size on the kernel is used.
    """

    calls: tuple[Call, ...]
    main: int
    typed: tuple[int | Route, ...]
    dtypes: tuple[Dtypes, ...]
    watch: Watch = NOTHING
    extra: Extra = "original"
    space: ById | None = None
    scope: Hashable | None = None
    gains: Gains = EVERY_SIZE

    @property
    def uncompiled(self) -> bool:
        """Whether a call that ``torch.compile`` or ``torch.export`` traces is the original's."""
        return self.scope is not None or self.watch.untraced
