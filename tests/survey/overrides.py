"""What the rules of `small` do not know, by model type; and what else a model must be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OVERRIDES: Mapping[str, Mapping[str, Any]] = {}
