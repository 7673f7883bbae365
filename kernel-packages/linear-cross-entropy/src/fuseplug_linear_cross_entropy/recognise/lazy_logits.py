"""Lazy logits of a head, whose cross-entropy is computed without their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug import Compute
from fuseplug_linear_cross_entropy.lazy_tensor import LazyTensor

from ..reference import FLOAT, Reduction, Step
from .lazy_logprobs import GATHER, LOG_SOFTMAX, LazyLogProbs, are_words, bound, labels_of
from .lazy_rows import LazyRows, Logits, moved_rows


def lazy_linear(compute: Compute, hidden: Tensor, weight: Tensor, bias: Tensor | None, checked: frozenset[str]) -> Any:
    """``F.linear(hidden, weight, bias)`` as `LazyLogits`; ``NotImplemented`` where it cannot be lazy.

    Args:
        compute: Computes the cross-entropy, with the signature of `linear_cross_entropy`.
        hidden: ``(..., hidden)``, floating.
        weight: ``(vocabulary, hidden)``.
        bias: ``(vocabulary,)``, or ``None``.
        checked: As in `Logits`.
    """
    x, w, b = hidden, weight, bias
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
    if x.dim() < 2 or w.dtype != x.dtype or (b is not None and b.dtype != x.dtype):
        return NotImplemented
    shape = x.shape[:-1]
    rows = torch.arange(shape.numel(), device="cpu").view(shape)
    logits = Logits(compute, x.reshape(-1, x.shape[-1]), w, b, rows, checked=checked)
    return LazyLogits.standing_for(functional.linear, x, w, b, logits=logits)


class LazyLogits(LazyRows):
    """Logits that stay lazy through what models do between head and loss.

    Models widen, scale and cap logits, and add to them. They move and choose whole rows, and cut the vocabulary. They
    take the loss, or the logarithm of the softmax, from which trainers make their own losses.
    """

    def foreseen(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer without the values, or return ``NotImplemented``."""
        if not args or args[0] is not self:
            if "input" in kwargs and kwargs["input"] is self and not args:
                args, kwargs = (self,), {name: value for name, value in kwargs.items() if name != "input"}
            elif function not in _COMMUTES or len(args) != 2 or args[1] is not self:
                return NotImplemented
        logits: Logits = self.facts["logits"]
        if function in _REDUCING:
            return _REDUCING[function](self, function, args, kwargs)
        steps = _steps(self, function, args, kwargs)
        if steps is not None:
            return self.then(function, args, kwargs, logits=replace(logits, steps=(*logits.steps, *steps)))
        if function in _ADDING:
            bias = _added(self, args, kwargs)
            return NotImplemented if bias is None else self.then(function, args, kwargs, logits=bias)
        return self.rearranged(function, args[1:], kwargs)

    def _chosen(self, key: Any) -> Any:
        cut = self._cut(self.facts["logits"], key)
        return super()._chosen(key) if cut is None else self.then(Tensor.__getitem__, (self, key), {}, logits=cut)

    def _cut(self, logits: Logits, key: Any) -> Logits | None:
        """The logits of ``self[key]``, if the key takes the same range of each row; else ``None``."""
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(item, Tensor | list) for item in keys):
            return None
        columns = _columns(keys, self)
        if columns is None:
            return None
        moved = moved_rows(self._rows, self.shape[-1], Tensor.__getitem__, ((*keys[:-1], slice(None)),), {})
        if moved is None:
            return None
        bias = None if logits.bias is None else logits.bias[columns]
        return replace(logits, rows=moved, weight=logits.weight[columns], bias=bias)

    def _gather(self, _function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One logit of each row, from which trainers subtract the `_logsumexp`."""
        labels, logits = labels_of(self, args, kwargs), self.facts["logits"]
        try:
            wanted = labels is not None and self.dtype is torch.float32
            selected = logits.logits_of_labels(labels) if wanted else None
        except IndexError:
            return NotImplemented  # A label is no word: the original says so.
        return NotImplemented if selected is None else selected.unsqueeze(-1)

    def _logsumexp(self, _function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The logsumexp of each row, if `_gather` has found it."""
        arguments, logits = bound(args, kwargs, "dim", "keepdim"), self.facts["logits"]
        values = logits.logsumexps.of(logits)
        if arguments is None or values is None or not are_words(arguments.get("dim"), self):
            return NotImplemented
        return values.unsqueeze(-1) if arguments.get("keepdim") else values

    def _argmax(self, _function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The likeliest word of each row, which trainers compare with the label."""
        arguments = bound(args, kwargs, "dim", "keepdim")
        if arguments is None or not are_words(arguments.get("dim"), self):
            return NotImplemented
        largest = self.facts["logits"].largest()
        return largest.unsqueeze(-1) if arguments.get("keepdim") else largest

    def _loss(self, _function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._cross_entropy(self.facts["logits"], *args[1:], **kwargs)

    def _cross_entropy(
        self,
        logits: Logits,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if not logits.are_labelled(target, weight, size_average, reduce):
            return NotImplemented
        return logits.losses(target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


_SCALING: dict[Any, str] = {
    Tensor.mul: "mul",
    Tensor.__mul__: "mul",
    Tensor.__rmul__: "mul",
    torch.mul: "mul",
    Tensor.div: "div",
    Tensor.__truediv__: "div",
    torch.div: "div",
    torch.true_divide: "div",
}
_ADDING = frozenset({Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add})
_COMMUTES = _ADDING | _SCALING.keys()
_REDUCING: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: LazyLogits._loss,
    **dict.fromkeys(LOG_SOFTMAX, LazyLogProbs.of),
    **dict.fromkeys(GATHER, LazyLogits._gather),
    **dict.fromkeys((Tensor.argmax, torch.argmax), LazyLogits._argmax),
    Tensor.logsumexp: LazyLogits._logsumexp,
    torch.logsumexp: LazyLogits._logsumexp,
}
"""Functions whose results are made of all words of a row, or that the kernel can answer for each row."""
_TANH = frozenset({torch.tanh, Tensor.tanh, functional.tanh})


def _steps(lazy: LazyLogits, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Step, ...] | None:
    """The steps that *function* applies to each logit; ``None`` if it does something else."""
    rest = args[1:] if args[0] is lazy else args[:1]
    if function in _SCALING:
        number: Any = rest[0] if len(rest) == 1 and not kwargs else None
        kind = _SCALING[function]
        if type(number) not in (int, float) or not math.isfinite(number) or (kind == "div" and number == 0):
            return None
        # A number on the left of a division is not a step: x / y goes to y's __rtruediv__.
        return (Step(kind, float(number)),) if args[0] is lazy or kind == "mul" else None
    if function in _TANH and not rest and not kwargs:
        return (Step("tanh"),) if "capped" in lazy.facts["logits"].checked else None
    if function is Tensor.to:
        widened = rest == (torch.float32,) and lazy.dtype in (torch.float16, torch.bfloat16)
        return (FLOAT,) if widened and not kwargs else None
    return None


def _added(tensor: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Logits | None:
    """The logits of *tensor*, with the vector that is added to each row as a bias; ``None`` for any other addition."""
    logits: Logits = tensor.facts["logits"]
    added = args[1] if args[0] is tensor else args[0]
    if (
        "added" not in logits.checked
        or kwargs
        or len(args) != 2
        or logits.steps
        or not isinstance(added, Tensor)
        or isinstance(added, LazyTensor)
        or added.dtype != tensor.dtype
        or added.device != tensor.device
        or added.dim() > tensor.dim()
        or added.shape[-1:] != tensor.shape[-1:]
        or added.numel() != tensor.shape[-1]
    ):
        return None
    vector = added.reshape(-1)
    return replace(logits, bias=vector if logits.bias is None else logits.bias + vector)


def _columns(keys: Sequence[Any], tensor: Tensor) -> slice | None:
    """The range of the vocabulary that an index takes; ``None`` if it takes all of it, or anything but a range."""
    last = keys[-1] if keys else None
    counted = sum(key is not None and key is not Ellipsis for key in keys)
    reached = counted == tensor.dim() or (Ellipsis in keys and keys[-1] is not Ellipsis)
    if not reached or type(last) is not slice or last.step not in (None, 1):
        return None
    start, stop, _ = last.indices(tensor.shape[-1])
    return None if (start, stop) == (0, tensor.shape[-1]) or stop <= start else slice(start, stop)
