"""Lazy rows that have a number for each word, and the tokens to which they belong."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from fuseplug import Compute
from fuseplug_linear_cross_entropy.lazy_tensor import LazyTensor
from fuseplug_linear_cross_entropy.lazy_tensor.nested import mapped

from ..reference import FLOAT, Reduction, Step, logits_of

NOTHING_IGNORED = torch.iinfo(torch.int64).min
"""The label to ignore if none is to be ignored."""

_FEW = 1 << 24
"""How many logits `Logits.largest` has in memory at a time."""


@dataclass
class LogSumExps:
    """The logarithm of the sum of exponentials of some rows, kept for the next question.

    Attributes:
        logits: The logits of these rows; ``None`` before anything was computed.
        values: One number for each row, flat, in the order of ``logits.rows``.
    """

    logits: Logits | None = None
    values: Tensor | None = None

    def of(self, logits: Logits) -> Tensor | None:
        """The values for the rows of *logits*; ``None`` if one of them was not computed."""
        known, values = self.logits, self.values
        if known is None or values is None or known.head != logits.head:
            return None
        places = torch.full(known.hidden.shape[:1], -1, device="cpu")
        places[known.rows.flatten()] = torch.arange(known.rows.numel(), device="cpu")
        at = places[logits.rows]
        return None if (at < 0).any() else values[at.to(values.device)]


@dataclass(frozen=True)
class Logits:
    """The facts about lazy logits from which their loss can be computed without them.

    Attributes:
        compute: The kernel, with the signature of `linear_cross_entropy`.
        hidden: ``(tokens, hidden)``: the input of the head.
        weight: ``(vocabulary, hidden)``: its weight.
        bias: ``(vocabulary,)``: its bias, or ``None``.
        rows: The token of each row of logits, int64, on the CPU, of the shape of the logits without the last dimension.
        steps: The steps that were applied to each logit since.
        checked: Further uses on which the kernel was checked: logits that went through a tanh (``"capped"``), or to
            which a vector was added (``"added"``).
        logsumexps: Results for these logits, and for others that were made from the same ones.
    """

    compute: Compute
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: Tensor
    steps: tuple[Step, ...] = ()
    checked: frozenset[str] = frozenset()
    logsumexps: LogSumExps = field(default_factory=LogSumExps)

    @property
    def head(self) -> tuple[Any, ...]:
        """All that a row depends on besides its token; the tensors by identity."""
        return id(self.hidden), id(self.weight), id(self.bias), self.steps

    @property
    def of_rows(self) -> Tensor:
        """The input of the head for each row, ``(..., hidden)``."""
        count = self.hidden.shape[0]
        if self.rows.numel() == count and torch.equal(self.rows.flatten(), torch.arange(count, device="cpu")):
            return self.hidden.view(*self.rows.shape, self.hidden.shape[1])
        # A copy of the input of the head is small beside the logits.
        return self.hidden[self.rows.to(self.hidden.device)]

    def are_labelled(self, labels: Any, *others: Any) -> bool:
        """Whether rows have one dimension, *labels* has a label for each, and all *others* are ``None``.

        The others are arguments of torch's losses that no kernel serves: ``weight``, ``size_average``, ``reduce``.
        """
        return (
            all(other is None for other in others)
            and self.rows.dim() == 1
            and type(labels) is Tensor
            and labels.dtype == torch.int64
            and labels.shape == self.rows.shape
            and labels.device == self.hidden.device
        )

    def logits_of_labels(self, labels: Tensor) -> Tensor | None:
        """The logit of the label of each row, of the shape of `rows`; ``None`` if the kernel has no statistics.

        Raises:
            IndexError: On a CPU, if a label is not in the vocabulary.
        """
        if "statistics" not in inspect.signature(self.compute).parameters:
            return None
        results: Any = self.losses(labels, NOTHING_IGNORED, "none", 0.0, statistics=("logsumexp",))
        loss, logsumexp = cast("tuple[Tensor, Tensor]", (results.loss, results.logsumexp))
        self.logsumexps.logits, self.logsumexps.values = self, logsumexp.flatten()
        return logsumexp - loss

    def largest(self) -> Tensor:
        """The index of the largest logit of each row, or of the first of several, int64, of the shape of `rows`.

        The logits are computed for a few rows at a time, and then dropped.
        """
        rows, few = self.of_rows.reshape(-1, self.hidden.shape[-1]), max(1, _FEW // len(self.weight))
        with torch.no_grad(), torch.autocast(self.hidden.device.type, enabled=False):
            parts = [logits_of(part, self.weight, self.bias, self.steps).argmax(-1) for part in rows.split(few)]  # type: ignore[no-untyped-call]
        return torch.cat(parts).view(self.rows.shape)

    def losses(
        self,
        labels: Tensor,
        ignore_index: int,
        reduction: Reduction,
        label_smoothing: float | None,
        **statistics: Any,
    ) -> Tensor:
        """The cross-entropy of all rows, computed by the kernel: the result of `linear_cross_entropy`.

        Args:
            labels: The label of each row, of the shape of `rows`.
            ignore_index: As for `linear_cross_entropy`.
            reduction: As for `linear_cross_entropy`.
            label_smoothing: As for `linear_cross_entropy`.
            **statistics: As for `linear_cross_entropy`.
        """
        kind = self.hidden.device.type
        # Under autocast, F.cross_entropy widens. The input of the head already has the dtype of autocast.
        steps = (*self.steps, FLOAT) if torch.is_autocast_enabled(kind) else self.steps
        with torch.autocast(kind, enabled=False):
            losses: Tensor = self.compute(
                self.of_rows,
                self.weight,
                labels,
                self.bias,
                steps=steps,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
                **statistics,
            )
        return losses


class LazyRows(LazyTensor):
    """A lazy tensor whose whole rows can be copied, moved and chosen; the words of a row stay together."""

    def rearranged(self, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(self, *rest, **kwargs)``, if whole rows are copied, moved or chosen; or ``NotImplemented``."""
        rest, kwargs = mapped(_settled, tuple(rest)), mapped(_settled, dict(kwargs))
        as_it_is = function is Tensor.to and rest == (self.dtype,)
        if as_it_is or (function in _COPIES and not rest and not kwargs):
            return self.then(function, (self, *rest), kwargs)
        if function is Tensor.__getitem__:
            return self._chosen(rest[0])
        if function in _CUTS:
            return self._pieces(function, rest, kwargs)
        moved = moved_rows(self._rows, self.shape[-1], function, rest, kwargs)
        return NotImplemented if moved is None else self._with(moved, function, rest, kwargs)

    @property
    def _rows(self) -> Tensor:
        """`Logits.rows`, contiguous if this tensor is: ``.float()`` closes gaps, and then allows more views."""
        rows: Tensor = self.facts["logits"].rows
        return rows.contiguous() if self.is_contiguous() else rows

    def _chosen(self, key: Any) -> Any:
        """``self[key]``, if that takes whole rows."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(item is None or item is Ellipsis or type(item) in (int, slice, Tensor) for item in keys):
            return NotImplemented
        if not any(type(item) is Tensor for item in keys):
            moved = moved_rows(self._rows, self.shape[-1], Tensor.__getitem__, (key,), {})
            return NotImplemented if moved is None else self._with(moved, Tensor.__getitem__, (key,), {})
        # Rows are chosen on the CPU, where they are kept. A mask must be read anyway, to know how many it chooses.
        places = _places(keys, self._rows)
        if places is None:
            return NotImplemented
        return self._with(self._rows[places], Tensor.__getitem__, (places,), {})

    def _pieces(self, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(self, ...)``, a tuple, if each piece has whole rows."""
        moved = _moved_pieces(self._rows, self.shape[-1], function, rest, kwargs)
        if moved is None:
            return NotImplemented
        pieces = [functools.partial(_piece, function, number) for number in range(len(moved))]
        return tuple(self._with(rows, piece, rest, kwargs) for rows, piece in zip(moved, pieces, strict=True))

    def _with(self, rows: Tensor, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(self, *rest, **kwargs)``, whose result has the *rows*."""
        return self.then(function, (self, *rest), kwargs, logits=replace(self.facts["logits"], rows=rows))


_COPIES = frozenset({Tensor.contiguous, Tensor.clone})
_MOVES = frozenset(
    {
        Tensor.view,
        Tensor.unsqueeze,
        torch.unsqueeze,
        Tensor.squeeze,
        torch.squeeze,
        Tensor.transpose,
        torch.transpose,
        Tensor.narrow,
        torch.narrow,
        Tensor.unflatten,
    }
)
_CUTS = frozenset({Tensor.split, torch.split, Tensor.chunk, torch.chunk, Tensor.unbind, torch.unbind})
_REGROUPS = frozenset({Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten})


def _settled(value: Any) -> Any:
    """A number for a tensor that stands for one, also in a slice, because somebody may write into the tensor later."""
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return slice(*[None if bound is None else operator.index(bound) for bound in bounds])
    is_number = type(value) is Tensor and value.dim() == 0 and value.dtype in (torch.int64, torch.int32)
    return int(value) if is_number else value


def moved_rows(
    rows: Tensor, vocabulary: int, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """*rows* after *function*, if that only moves whole rows of logits; ``None`` otherwise.

    The function is applied to a tensor of the logits' shape that repeats one number along each row, without memory.
    """
    if function in _REGROUPS:
        rows = rows.contiguous()
    elif function not in _MOVES and function is not Tensor.__getitem__:
        return None
    spread = _spread(rows, vocabulary)
    try:
        if function in _REGROUPS:
            # By a view, because a copy would have the size of the logits.
            rest, kwargs, function = (function(spread.to("meta"), *rest, **kwargs).shape,), {}, Tensor.view
        moved: Tensor = function(spread, *rest, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None  # The real logits say what is wrong.
    return moved[..., 0] if _is_whole(moved, vocabulary) else None


def _moved_pieces(
    rows: Tensor, vocabulary: int, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor] | None:
    """The *rows* of each piece that *function* gives; ``None`` if a piece does not have whole rows."""
    try:
        pieces = function(_spread(rows, vocabulary), *rest, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None  # The real logits say what is wrong.
    return [piece[..., 0] for piece in pieces] if all(_is_whole(piece, vocabulary) for piece in pieces) else None


def _piece(function: Callable[..., Sequence[Tensor]], number: int, *args: Any, **kwargs: Any) -> Tensor:
    return function(*args, **kwargs)[number]


def _spread(rows: Tensor, vocabulary: int) -> Tensor:
    """A tensor of the logits' shape that repeats one number along each row, without memory."""
    return rows.unsqueeze(-1).expand(*rows.shape, vocabulary)


def _is_whole(moved: Tensor, vocabulary: int) -> bool:
    whole = moved.dim() > 0 and moved.shape[-1] == vocabulary and (moved.stride(-1) == 0 or vocabulary == 1)
    return whole and moved._is_view()


def _places(keys: Sequence[Any], rows: Tensor) -> tuple[Any, ...] | None:
    """*keys* for *rows*, on the CPU like these; ``None`` if a key is of another kind, or if words are chosen as well.

    A mask becomes the indices that it chooses. Each tensor is copied, because somebody may write into it later.
    """
    places: list[Any] = []
    dimension = 0
    for key in keys:
        if type(key) is not Tensor:
            places.append(key)
        elif key.dtype == torch.bool and key.dim() and key.shape == rows.shape[dimension : dimension + key.dim()]:
            places += key.cpu().nonzero(as_tuple=True)
            dimension += key.dim() - 1
        elif key.dtype == torch.int64:
            places.append(key.to("cpu", copy=True))
        else:
            return None  # The real logits say what is wrong.
        dimension += key is not None
    if any(key is Ellipsis for key in places):
        return None
    count, dimensions = sum(key is not None for key in places), rows.dim()
    if count == dimensions + 1 and type(places[-1]) is slice and places[-1] == slice(None):
        return tuple(places[:-1])
    return tuple(places) if count <= dimensions else None
