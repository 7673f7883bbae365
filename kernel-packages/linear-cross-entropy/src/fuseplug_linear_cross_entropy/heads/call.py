"""A call of the function by which a head scores tokens, expressed in terms of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug import Compute

from ..reference import FLOAT, Step

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""The results that follow the log-probabilities; each is ``None`` if it was not asked for."""

DIFFERENTIABLE = ("log_probs", "entropy")
NOTHING_IGNORED = torch.iinfo(torch.int64).min

Results = Sequence[Tensor | None]


class HeadCall(NamedTuple):
    """The arguments, in the order of TRL's ``ChunkedLogProbFunction``.

    Attributes:
        hidden: ``(tokens, hidden)``, floating.
        weight: ``(vocabulary, hidden)``, floating.
        bias: ``(vocabulary,)`` or ``None``, floating.
        targets: ``(tokens,)``, int64: the words whose log-probabilities are wanted.
        temperature: The number that divides the logits, as the last step.
        chunk_size: How many words the function processes at a time.
        final_logit_softcapping: A cap for the logits, or ``None``.
        logit_scale: The number that multiplies the logits, as the first step.
        outputs: The names in `OUTPUTS` of the further results that are wanted; other names are ignored.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperature: float
    chunk_size: int
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    outputs: Sequence[str] = OUTPUTS

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the results that are wanted besides the log-probabilities."""
        return tuple(name for name in OUTPUTS if name in self.outputs)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that are applied to each logit."""
        cap = self.final_logit_softcapping
        capped = () if cap is None else (Step("div", cap), Step("tanh"), Step("mul", cap))
        return FLOAT, Step("mul", float(self.logit_scale)), *capped, Step("div", float(self.temperature))

    def scored_by(self, compute: Compute) -> Results:
        """The log-probabilities and `OUTPUTS`, computed by *compute*, each ``(tokens,)``, float32 or bool.

        As in the function, only log-probabilities and entropy have gradients.

        Args:
            compute: A function with the signature of `fuseplug_linear_cross_entropy.reference.linear_cross_entropy`.
        """
        weight, bias = self.weight, self.bias
        more: dict[str, Any] = {"statistics": self.statistics} if self.statistics else {}
        result = compute(
            *(self.hidden, weight, self.targets, bias),
            **{"steps": self.steps, "ignore_index": NOTHING_IGNORED, "reduction": "none", **more},
        )
        losses = result.loss if self.statistics else result
        values = [getattr(result, name) if name in self.statistics else None for name in OUTPUTS]
        detached = [
            value if value is None or name in DIFFERENTIABLE else value.detach()
            for name, value in zip(OUTPUTS, values, strict=True)
        ]
        return -losses, *detached


Score = Callable[[HeadCall], Results]
"""Computes the results of a call: the function itself, or `HeadCall.scored_by` with a kernel."""
