"""Rows of a number for each word, not yet computed, and which token each of them is of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from fuseplug import Compute
from fuseplug_linear_cross_entropy.lazy_tensor import LazyTensor

from ..reference import FLOAT, Reduction, Step, logits_of

NOTHING_IGNORED = torch.iinfo(torch.int64).min
"""The label to be ignored, where none is."""

_FEW = 1 << 24
"""Logits that are in memory at a time."""


@dataclass
class LogSumExps:
    """The logarithm of the sum of exponentials of some rows, kept for the next question.

    Attributes:
        logits: What they were computed of; ``None`` before that.
        values: In the order of ``logits.rows``, flat.
    """

    logits: Logits | None = None
    values: Tensor | None = None

    def of(self, logits: Logits) -> Tensor | None:
        """Those of the rows of *logits*; ``None`` if one of them was not computed."""
        known, values = self.logits, self.values
        if known is None or values is None or known.head != logits.head:
            return None
        places = torch.full(known.hidden.shape[:1], -1, device="cpu")
        places[known.rows.flatten()] = torch.arange(known.rows.numel(), device="cpu")
        at = places[logits.rows]
        return None if (at < 0).any() else values[at.to(values.device)]


@dataclass(frozen=True)
class Logits:
    """What is known of lazy logits, so that their loss can be computed without them.

    Attributes:
        compute: The kernel, with the signature of `linear_cross_entropy`.
        hidden: ``(tokens, hidden)``: the input of the head.
        weight: ``(vocabulary, hidden)``: its weight.
        bias: ``(vocabulary,)``: its bias, or ``None``.
        rows: Which token each row of logits is of, int64, of the shape of the logits without the last dimension; on the
            CPU.
        steps: What was done to each logit since.
        checked: What the kernel was checked on besides: logits that went through a tanh (``"capped"``), or to which a
            vector was added (``"added"``).
        logsumexps: What was computed of these, and of others that were made of the same logits.
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
        """What a row depends on besides its token; the tensors by identity."""
        return id(self.hidden), id(self.weight), id(self.bias), self.steps

    @property
    def of_rows(self) -> Tensor:
        """The input of the head for each row, ``(..., hidden)``."""
        count = self.hidden.shape[0]
        if self.rows.numel() == count and torch.equal(self.rows.flatten(), torch.arange(count, device="cpu")):
            return self.hidden.view(*self.rows.shape, -1)
        # A copy of the input of the head is small beside the logits.
        return self.hidden[self.rows.to(self.hidden.device)]

    def are_labelled(self, labels: Any, *others: Any) -> bool:
        """Whether *labels* has one for each of one line of rows, and all *others* are ``None``.

        The others are what else torch's losses take and no kernel serves: ``weight``, ``size_average``, ``reduce``.
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
            IndexError: On a CPU, if a label is no word.
        """
        if "statistics" not in inspect.signature(self.compute).parameters:
            return None
        results: Any = self.losses(labels, NOTHING_IGNORED, "none", 0.0, statistics=("logsumexp",))
        loss, logsumexp = cast("tuple[Tensor, Tensor]", (results.loss, results.logsumexp))
        self.logsumexps.logits, self.logsumexps.values = self, logsumexp.flatten()
        return logsumexp - loss

    def largest(self) -> Tensor:
        """Which logit of each row is the largest, the first of several, int64, of the shape of `rows`.

        Computed for few rows at a time, whose logits are then dropped.
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
        """The cross-entropy of all rows by the kernel, as `linear_cross_entropy` gives it.

        Args:
            labels: For each row, of the shape of `rows`.
            ignore_index: As there.
            reduction: As there.
            label_smoothing: As there.
            **statistics: As there.
        """
        kind = self.hidden.device.type
        # Under autocast F.cross_entropy widens; the input of the head has its dtype already.
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
    """A lazy tensor of which whole rows are copied, moved and chosen, the words of each together."""

    def rearranged(self, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(self, *rest, **kwargs)``, if whole rows are copied, moved or chosen; or ``NotImplemented``."""
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
        """As `Logits` has them. A view of these may be none of rows that lie otherwise: .float() closes gaps."""
        rows: Tensor = self.facts["logits"].rows
        return rows.contiguous() if self.is_contiguous() else rows

    def _chosen(self, key: Any) -> Any:
        """``self[key]``, if that is whole rows."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(item is None or item is Ellipsis or type(item) in (int, slice, Tensor) for item in keys):
            return NotImplemented
        if not any(type(item) is Tensor for item in keys):
            moved = moved_rows(self._rows, self.shape[-1], Tensor.__getitem__, (key,), {})
            return NotImplemented if moved is None else self._with(moved, Tensor.__getitem__, (key,), {})
        # Rows are chosen where they are kept. A mask is looked at anyway, to know how many it chooses.
        places = _places(keys, self._rows)
        if places is None:
            return NotImplemented
        return self._with(self._rows[places], Tensor.__getitem__, (places,), {})

    def _pieces(self, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(self, ...)``, a tuple, if each piece is of whole rows."""
        moved = _moved_pieces(self._rows, self.shape[-1], function, rest, kwargs)
        if moved is None:
            return NotImplemented
        pieces = [functools.partial(_piece, function, number) for number in range(len(moved))]
        return tuple(self._with(rows, piece, rest, kwargs) for rows, piece in zip(moved, pieces, strict=True))

    def _with(self, rows: Tensor, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(self, *rest, **kwargs)``, which has the *rows*."""
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


def moved_rows(
    rows: Tensor, vocabulary: int, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """*rows* after *function*, if that only moves whole rows of logits; ``None`` otherwise.

    The function is done to a tensor of the logits' shape that has the same number all along each row, in no memory.
    """
    if function in _REGROUPS:
        rows = rows.contiguous()
    elif function not in _MOVES and function is not Tensor.__getitem__:
        return None
    spread = _spread(rows, vocabulary)
    try:
        # The view of a reshape: a copy would have the size of the logits.
        done = spread.view if function in (Tensor.reshape, torch.reshape) else None
        moved: Tensor = done(*rest, **kwargs) if done is not None else function(spread, *rest, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None  # What is wrong with it, the real logits say.
    return moved[..., 0] if _is_whole(moved, vocabulary) else None


def _moved_pieces(
    rows: Tensor, vocabulary: int, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor] | None:
    """The *rows* of each piece that *function* gives; ``None`` if one is not of whole rows."""
    try:
        pieces = function(_spread(rows, vocabulary), *rest, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None  # What is wrong with it, the real logits say.
    return [piece[..., 0] for piece in pieces] if all(_is_whole(piece, vocabulary) for piece in pieces) else None


def _piece(function: Callable[..., Sequence[Tensor]], number: int, *args: Any, **kwargs: Any) -> Tensor:
    return function(*args, **kwargs)[number]


def _spread(rows: Tensor, vocabulary: int) -> Tensor:
    """A tensor of the shape of logits that has the same number all along each row, in no memory."""
    return rows.unsqueeze(-1).expand(*rows.shape, vocabulary)


def _is_whole(moved: Tensor, vocabulary: int) -> bool:
    whole = moved.dim() > 0 and moved.shape[-1] == vocabulary and (moved.stride(-1) == 0 or vocabulary == 1)
    return whole and moved._is_view()


def _places(keys: Sequence[Any], rows: Tensor) -> tuple[Any, ...] | None:
    """*keys* for *rows*, on the CPU, where those are; ``None`` if they are of another kind, or choose words as well.

    A mask becomes the numbers of what it chooses. Each tensor is copied: it may be written into.
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
            return None  # What is wrong with it, the real logits say.
        dimension += key is not None
    if any(key is Ellipsis for key in places):
        return None
    count, dimensions = sum(key is not None for key in places), rows.dim()
    if count == dimensions + 1 and type(places[-1]) is slice and places[-1] == slice(None):
        return tuple(places[:-1])
    return tuple(places) if count <= dimensions else None
