"""What a replacement says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import Target


@dataclass(frozen=True)
class Mark:
    """Identifies a replacement as ours, so that it is recognised everywhere, also in copies of models."""

    kernel_id: str
    variant: str
    target: Target
    device_type: str
