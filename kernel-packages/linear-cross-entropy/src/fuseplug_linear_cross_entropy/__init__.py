"""The loss of a language model, from hidden states and the weight of its head, without the logits in memory.

`linear_cross_entropy` and `linear_logprob` compute on every device; the kernels that Fuseplug finds are in
`fuseplug_linear_cross_entropy.kernels`. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

if TYPE_CHECKING:
    from .functional import linear_cross_entropy, linear_logprob
    from .reference import FLOAT, LogProbs, LossAndStatistics, Step, scaled, softcapped

__all__ = [
    "FLOAT",
    "LogProbs",
    "LossAndStatistics",
    "Step",
    "linear_cross_entropy",
    "linear_logprob",
    "scaled",
    "softcapped",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "FLOAT": ".reference",
        "LogProbs": ".reference",
        "LossAndStatistics": ".reference",
        "Step": ".reference",
        "linear_cross_entropy": ".functional",
        "linear_logprob": ".functional",
        "scaled": ".reference",
        "softcapped": ".reference",
    },
)
