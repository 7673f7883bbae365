"""The calls of a replacement that its kernel computes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from fuseplug_verify import VerifiedCalls

from .gains import EVERY_SIZE, Gains


@dataclass(frozen=True)
class Accepts(VerifiedCalls):
    """The calls that the kernel computes. All others go to the original.

    Attributes:
        space: For a function target, the globals in which its name is looked up, as in `Subject.space`; ``None`` if
            they are unknown.
        scope: The key of the scope that must be entered, as in `fuseplug.patching.scoping`; ``None``: no scope.
        gains: The sizes at which the kernel is used.
    """

    space: Any = None
    scope: Hashable | None = None
    gains: Gains = EVERY_SIZE

    @property
    def uncompiled(self) -> bool:
        """Whether the original computes calls that ``torch.compile`` or ``torch.export`` traces."""
        return self.scope is not None or self.watch.untraced
