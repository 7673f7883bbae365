"""The gated delta rule, the recurrence of Gated DeltaNet and Kimi Delta Attention in Hugging Face models.

`gated_delta_rule` computes on every device; the kernels that Fuseplug finds are in `fuseplug_gated_delta_rule.kernels`.
Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import gated_delta_rule

__all__ = ["gated_delta_rule"]

__getattr__, __dir__ = lazy(__name__, {"gated_delta_rule": ".functional"})
