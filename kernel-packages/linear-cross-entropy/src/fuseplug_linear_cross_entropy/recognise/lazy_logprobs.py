"""Lazy log-probabilities of all words. Those of labels, and sums over all words, are computed without the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..reference import FLOAT, Reduction
from .lazy_rows import NOTHING_IGNORED, LazyRows, Logits

LOG_SOFTMAX = frozenset({functional.log_softmax, torch.log_softmax, Tensor.log_softmax})
_NEGATIVE = frozenset({Tensor.neg, Tensor.__neg__, torch.neg})
GATHER = frozenset({Tensor.gather, torch.gather})
_SUM = frozenset({Tensor.sum, torch.sum})


@dataclass
class _Losses:
    """A result of the kernel, kept for the next question.

    Attributes:
        rows: The `Logits.rows` for which it was computed.
        even: The mean of the negative log-probabilities of all words, of the shape of *rows*.
    """

    rows: Tensor | None = None
    even: Tensor | None = None


class LazyLogProbs(LazyRows):
    """Log-probabilities, or their negatives.

    The kernel gathers those of labels, which reinforcement learning needs. On the way, it finds the sums over all
    words, which the Trainer takes next if it has a ``label_smoothing_factor``.
    """

    @classmethod
    def of(cls, lazy: LazyRows, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``log_softmax(lazy, ...)`` of logits, over the words; ``NotImplemented`` for any other log-softmax."""
        arguments = bound(args, kwargs, "dim", also=("dtype", "_stacklevel"))
        logits: Logits = lazy.facts["logits"]
        if (
            arguments is None
            or not are_words(arguments.get("dim"), lazy)
            or arguments.get("dtype") not in (None, lazy.dtype, torch.float32)
            or torch.is_autocast_enabled(logits.hidden.device.type)
        ):
            return NotImplemented
        # Widened, so that a sum over all words is not rounded to a half type and then multiplied.
        wide = replace(logits, steps=(*logits.steps, FLOAT))
        return lazy.then(function, args, kwargs, into=cls, logits=wide, sign=1.0, losses=_Losses())

    def foreseen(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer without the values, or return ``NotImplemented``."""
        if not args or args[0] is not self:
            return NotImplemented
        if function in _NEGATIVE:
            return self.then(function, args, kwargs, sign=-self.facts["sign"])
        if function in GATHER:
            return self._gather(labels_of(self, args, kwargs))
        if function in _SUM:
            return self._sum(bound(args, kwargs, "dim", "keepdim", also=("dtype",)))
        if function is functional.nll_loss:
            return self._nll_loss(*args[1:], **kwargs)
        return self.rearranged(function, args[1:], kwargs)

    def _gather(self, labels: Tensor | None) -> Any:
        """One log-probability of each row."""
        logits: Logits = self.facts["logits"]
        if labels is None:
            return NotImplemented
        try:
            of_label, even = logits.losses(labels, NOTHING_IGNORED, reduction="none", label_smoothing=None)
        except IndexError:
            return NotImplemented  # A label is no word: the original says so.
        losses: _Losses = self.facts["losses"]
        losses.rows, losses.even = logits.rows, even
        return (of_label * -self.facts["sign"]).unsqueeze(-1).to(self.dtype)

    def _sum(self, arguments: Mapping[str, Any] | None) -> Any:
        """The sum of each row, if the kernel has found it."""
        losses: _Losses = self.facts["losses"]
        dtype = None if arguments is None else arguments.get("dtype") or self.dtype
        if (
            arguments is None
            or not are_words(arguments.get("dim"), self)
            or dtype not in (self.dtype, torch.float32)
            or losses.even is None
            or losses.rows is not self.facts["logits"].rows
        ):
            return NotImplemented
        sums = losses.even * (-self.facts["sign"] * self.shape[-1])
        return (sums.unsqueeze(-1) if arguments.get("keepdim") else sums).to(dtype)

    def _nll_loss(
        self,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: Reduction = "mean",
    ) -> Any:
        """The cross-entropy of the logits."""
        logits: Logits = self.facts["logits"]
        autocast = torch.is_autocast_enabled(logits.hidden.device.type)
        if autocast or not logits.are_labelled(target, weight, size_average, reduce):
            return NotImplemented
        losses = logits.losses(target, ignore_index=ignore_index, reduction=reduction, label_smoothing=0.0)
        return (losses * self.facts["sign"]).to(self.dtype)


def labels_of(lazy: LazyRows, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The label of each row, if ``gather(lazy, ...)`` takes one word of each row; ``None`` otherwise."""
    logits: Logits = lazy.facts["logits"]
    arguments = bound(args, kwargs, "dim", "index") or {}
    index = arguments.get("index")
    if (
        not are_words(arguments.get("dim"), lazy)
        or type(index) is not Tensor
        or index.dtype != torch.int64
        or index.shape != (*logits.rows.shape, 1)
        or index.device != logits.hidden.device
    ):
        return None
    return index.squeeze(-1)


def bound(
    args: Sequence[Any], kwargs: Mapping[str, Any], *names: str, also: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The arguments after the first, by name; ``None`` if any is not in *names*, nor, as a keyword, in *also*."""
    arguments = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    return arguments if len(args) <= 1 + len(names) and arguments.keys() <= {*names, *also} else None


def are_words(dim: Any, tensor: Tensor) -> bool:
    """Whether *dim* is the last dimension of *tensor*."""
    (number,) = dim if isinstance(dim, list | tuple) and len(dim) == 1 else (dim,)
    return type(number) is int and number in (-1, tensor.dim() - 1)
