"""The logits of a head, until something needs their values; their cross-entropy does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug import Compute
from fuseplug.lazy_tensor import LazyTensor

from ..reference import FLOAT, Step


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
    """

    compute: Compute
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: Tensor
    steps: tuple[Step, ...] = ()
    checked: frozenset[str] = frozenset()

    @property
    def of_rows(self) -> Tensor:
        """The input of the head for each row, ``(..., hidden)``."""
        count = self.hidden.shape[0]
        if self.rows.numel() == count and torch.equal(self.rows.flatten(), torch.arange(count, device="cpu")):
            return self.hidden.view(*self.rows.shape, -1)
        # A copy of the input of the head is small beside the logits.
        return self.hidden[self.rows.to(self.hidden.device)]


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


class LazyLogits(LazyTensor):
    """Logits that answer what models do between head and loss.

    They are widened, scaled, capped and added to; whole rows are moved and chosen; the vocabulary is cut; and the loss
    is taken.
    """

    def foreseen(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer without the values, or ``NotImplemented``."""
        if not args or args[0] is not self:
            if "input" in kwargs and kwargs["input"] is self and not args:
                args, kwargs = (self,), {name: value for name, value in kwargs.items() if name != "input"}
            elif function not in _COMMUTES or len(args) != 2 or args[1] is not self:
                return NotImplemented
        logits: Logits = self.facts["logits"]
        if function is functional.cross_entropy:
            return self._cross_entropy(logits, *args[1:], **kwargs)
        found = _step(self, function, args, kwargs)
        if found is not None:
            return self.then(function, args, kwargs, logits=replace(logits, steps=(*logits.steps, *found)))
        if function in _ADDING:
            bias = _added(self, args, kwargs)
            return NotImplemented if bias is None else self.then(function, args, kwargs, logits=bias)
        # A view of the logits may be none of rows that lie otherwise: .float() and .contiguous() close gaps.
        rows = logits.rows.contiguous() if self.is_contiguous() else logits.rows
        if function is Tensor.__getitem__ and not kwargs:
            return self._item(replace(logits, rows=rows), args[1])
        return self._rearranged(replace(logits, rows=rows), function, args[1:], kwargs)

    def _rearranged(self, logits: Logits, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(self, *rest, **kwargs)``, if that only moves whole rows."""
        moved = _moved(logits.rows, self.shape[-1], function, rest, kwargs)
        if moved is None:
            return NotImplemented
        return self.then(function, (self, *rest), kwargs, logits=replace(logits, rows=moved))

    def _item(self, logits: Logits, key: Any) -> Any:
        """``self[key]``, if that is whole rows, or the same range of each."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(each is None or each is Ellipsis or type(each) in (int, slice, Tensor) for each in keys):
            return NotImplemented
        if any(type(each) is Tensor for each in keys):
            # Rows are chosen where they are kept. A mask is looked at anyway, to know how many it chooses.
            places = _places(keys, logits.rows.dim())
            if places is None:
                return NotImplemented
            chosen = replace(logits, rows=logits.rows[places])
            return self.then(Tensor.__getitem__, (self, places), {}, logits=chosen)
        columns = _columns(keys, self)
        if columns is None:
            return self._rearranged(logits, Tensor.__getitem__, (key,), {})
        moved = _moved(logits.rows, self.shape[-1], Tensor.__getitem__, ((*keys[:-1], slice(None)),), {})
        if moved is None:
            return NotImplemented
        bias = None if logits.bias is None else logits.bias[columns]
        cut = replace(logits, rows=moved, weight=logits.weight[columns], bias=bias)
        return self.then(Tensor.__getitem__, (self, key), {}, logits=cut)

    def _cross_entropy(
        self,
        logits: Logits,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if (
            weight is not None
            or size_average is not None
            or reduce is not None
            or logits.rows.dim() != 1
            or type(target) is not Tensor
            or target.dtype != torch.int64
            or target.shape != logits.rows.shape
            or target.device != logits.hidden.device
        ):
            return NotImplemented
        self.check_inputs("cross_entropy")
        kind = logits.hidden.device.type
        # Under autocast F.cross_entropy widens; the input of the head has its dtype already.
        steps = (*logits.steps, FLOAT) if torch.is_autocast_enabled(kind) else logits.steps
        with torch.autocast(kind, enabled=False):
            return logits.compute(
                logits.of_rows,
                logits.weight,
                target,
                logits.bias,
                steps=steps,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
            )


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
_TANH = frozenset({torch.tanh, Tensor.tanh, functional.tanh})
_NOTHING = frozenset({Tensor.contiguous, Tensor.clone, torch.clone})
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
_REGROUPS = frozenset({Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten})


def _step(tensor: LazyLogits, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Step, ...] | None:
    """The steps that *function* does to each logit; ``None`` if it does something else."""
    rest = args[1:] if args[0] is tensor else args[:1]
    if function in _SCALING:
        number: Any = rest[0] if len(rest) == 1 and not kwargs else None
        kind = _SCALING[function]
        if type(number) not in (int, float) or not math.isfinite(number) or (kind == "div" and number == 0):
            return None
        # A number on the left of a division is not a step: x / y goes to y's __rtruediv__.
        return (Step(kind, float(number)),) if args[0] is tensor or kind == "mul" else None
    if function in _TANH and not rest and not kwargs:
        return (Step("tanh"),) if "capped" in tensor.facts["logits"].checked else None
    if function in _NOTHING and not rest and not kwargs:
        return ()
    if function is Tensor.float and not rest and not kwargs:
        return _widened(tensor, torch.float32)
    if function is Tensor.to or function is Tensor.type:
        return _cast(tensor, rest, kwargs)
    return None


def _cast(tensor: LazyLogits, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Step, ...] | None:
    """The steps of ``.to(...)``: none for the device and the dtype that the logits have, or a widening to float32."""
    if len(rest) + len(kwargs) != 1 or not kwargs.keys() <= {"dtype", "device"}:
        return None
    (to,) = (*rest, *kwargs.values())
    if isinstance(to, torch.dtype):
        return _widened(tensor, to)
    if isinstance(to, str | torch.device | int) and not isinstance(to, bool):
        try:
            device = torch.device(to)
        except RuntimeError:  # the name of a type, or of no device: the original raises or casts
            return None
        same = device.type == tensor.device.type and device.index in (None, tensor.device.index)
        return () if same else None
    return None


def _widened(tensor: LazyLogits, dtype: torch.dtype) -> tuple[Step, ...] | None:
    if dtype == tensor.dtype:
        return ()
    return (FLOAT,) if dtype == torch.float32 and tensor.dtype in (torch.float16, torch.bfloat16) else None


def _moved(
    rows: Tensor, vocabulary: int, function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """*rows* after *function*, if that only moves whole rows of logits; ``None`` otherwise.

    The function is done to a tensor of the logits' shape that has the same number all along each row, in no memory.
    """
    if function in _REGROUPS:
        rows = rows.contiguous()
    elif function not in _MOVES and function is not Tensor.__getitem__:
        return None
    spread = rows.unsqueeze(-1).expand(*rows.shape, vocabulary)
    try:
        # The view of a reshape: a copy would have the size of the logits.
        done = spread.view if function in (Tensor.reshape, torch.reshape) else None
        moved: Tensor = done(*rest, **kwargs) if done is not None else function(spread, *rest, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None  # What is wrong with it, the real logits say.
    whole = moved.dim() > 0 and moved.shape[-1] == vocabulary and (moved.stride(-1) == 0 or vocabulary == 1)
    return moved[..., 0] if whole and moved._is_view() else None


def _added(tensor: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Logits | None:
    """The logits of *tensor* with a vector added to each row, as a bias; ``None`` if something else is added."""
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


def _places(keys: Sequence[Any], dimensions: int) -> tuple[Any, ...] | None:
    """*keys* for the rows, on the CPU, where those are; ``None`` if they are of another kind, or choose words as well.

    A mask becomes the numbers of what it chooses.
    """
    found: list[Any] = []
    for key in keys:
        if type(key) is not Tensor:
            found.append(key)
        elif key.dtype == torch.bool and key.dim():
            found += key.cpu().nonzero(as_tuple=True)
        elif key.dtype == torch.int64:
            found.append(key.cpu())
        else:
            return None
    count = sum(key is not None for key in found)
    if any(key is Ellipsis for key in found):
        return None
    if count == dimensions + 1 and type(found[-1]) is slice and found[-1] == slice(None):
        return tuple(found[:-1])
    return tuple(found) if count <= dimensions else None


def _columns(keys: Sequence[Any], tensor: Tensor) -> slice | None:
    """The range of the vocabulary that an index takes; ``None`` if it takes all, or something else than a range."""
    last = keys[-1] if keys else None
    counted = sum(key is not None and key is not Ellipsis for key in keys)
    reached = counted == tensor.dim() or (Ellipsis in keys and keys[-1] is not Ellipsis)
    if not reached or type(last) is not slice or last.step not in (None, 1):
        return None
    start, stop, _ = last.indices(tensor.shape[-1])
    return None if (start, stop) == (0, tensor.shape[-1]) or stop <= start else slice(start, stop)
