"""The calls that a replacement computes by its kernel."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from fuseplug_verify import VerifiedCalls

from .gains import EVERY_SIZE, Gains


@dataclass(frozen=True)
class Accepts(VerifiedCalls):
    """The calls that the kernel computes; every other goes to the original.

    Attributes:
        space: For a function target, where the name is looked up, as `Subject.space`; ``None``: it is not known.
        scope: What must be entered, as in `fuseplug.patching.scoping`; ``None``: nothing.
        gains: From which size on the kernel is used.
    """

    space: Any = None
    scope: Hashable | None = None
    gains: Gains = EVERY_SIZE

    @property
    def uncompiled(self) -> bool:
        """Whether a call that ``torch.compile`` or ``torch.export`` traces is the original's."""
        return self.scope is not None or self.watch.untraced
