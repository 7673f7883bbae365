"""The mark of a replacement."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import Target


@dataclass(frozen=True)
class Mark:
    """Identifies a replacement as ours, so that it is recognised everywhere, including in copies of models."""

    kernel_id: str
    variant: str
    target: Target
    device_type: str
