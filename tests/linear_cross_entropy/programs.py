"""Random programs on logits: views, copies, casts, masks, writes, reads and losses, run on lazy and on plain logits."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from support.functions import Square
from torch import Tensor
from torch.nn import functional

from fuseplug_linear_cross_entropy.recognise.lazy_logits import lazy_linear
from fuseplug_linear_cross_entropy.reference import linear_cross_entropy

HIDDEN, VOCABULARY = 4, 7
REFUSED = re.compile(r"of a lazy |needs a lazy ")
"""Matches the error of a use that no longer has a right answer."""


class Refusal(Exception):
    """A lazy tensor had no right answer."""


class World:
    """What a program has made so far.

    Attributes:
        tensors: The logits, and the tensors made of them.
        losses: Results computed from the tensors, which a kernel may round differently.
        seen: Everything that was read on the way.
        answered: Whether gradients may differ by roundings, because a kernel may have computed one of the losses.
    """

    def __init__(self, seed: int, *, lazily: bool) -> None:
        draw = random.Random(f"inputs {seed}")
        generator = torch.Generator().manual_seed(seed)
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        shapes = [(2, 3, HIDDEN), (VOCABULARY, HIDDEN), *([(VOCABULARY,)] if draw.random() < 0.3 else [])]
        self.inputs = [torch.randn(*s, generator=generator).to(self.dtype).requires_grad_() for s in shapes]
        self.vector = torch.linspace(-1, 1, VOCABULARY).to(self.dtype)
        self.autocast = draw.random() < 0.1
        bias = self.inputs[2] if len(self.inputs) == 3 else None
        with self.surroundings():
            if lazily:
                logits = lazy_linear(linear_cross_entropy, *self.inputs[:2], bias, frozenset({"added", "capped"}))
            else:
                logits = functional.linear(*self.inputs[:2], bias)
        self.tensors: list[Tensor] = [logits]
        self.losses: list[Tensor] = []
        self.seen: list[Any] = []
        self.hooked: list[Any] = []
        self.answered = False

    def surroundings(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)


Draw = random.Random
Step = Callable[[World, Tensor, Draw], Any]


def _start(draw: Draw, size: int) -> int:
    return draw.randrange(size) if size else 0


def _middle(y: Tensor, draw: Draw) -> Tensor:
    start = _start(draw, y.shape[0])
    return y[start:] if y.dim() < 2 else y[:, _start(draw, y.shape[1]) :]


def _mask(shape: tuple[int, ...], draw: Draw) -> Tensor:
    return torch.tensor([draw.random() < 0.6 for _ in range(torch.Size(shape).numel())]).view(shape)


def _masked(y: Tensor, draw: Draw) -> Tensor:
    depth = draw.randrange(1, max(y.dim(), 2))
    shape = list(y.shape[:depth])
    if draw.random() < 0.15:
        shape[draw.randrange(depth)] += draw.choice([-1, 1])
    mask = _mask(tuple(max(size, 1) for size in shape), draw)
    if draw.random() < 0.2 and y.dim() > 2:
        return y[:, _mask((y.shape[1],), draw)]
    return y[mask]


def _chosen(y: Tensor, draw: Draw) -> Tensor:
    rows = torch.tensor([draw.randrange(-1, max(y.shape[0], 1) + (draw.random() < 0.05)) for _ in range(3)])
    return y[rows] if draw.random() < 0.5 or y.dim() < 2 else y[rows, torch.tensor([0, -1, 0])]


VIEWS: dict[str, Step] = {
    "middle": lambda w, y, d: _middle(y, d),
    "all but the last": lambda w, y, d: y[..., :-1, :],
    "one": lambda w, y, d: y[_start(d, y.shape[0])],
    "last of each": lambda w, y, d: y[:, -1],
    "words": lambda w, y, d: y[..., : d.randrange(1, VOCABULARY + 1)],
    "words between": lambda w, y, d: y[..., 1:-1],
    "every second word": lambda w, y, d: y[..., ::2],
    "new": lambda w, y, d: y[None],
    "flat": lambda w, y, d: y.view(-1, y.shape[-1]),
    "reshaped": lambda w, y, d: y.reshape(-1, y.shape[-1]),
    "flattened": lambda w, y, d: y.flatten(0, -2),
    "unflattened": lambda w, y, d: y.unflatten(0, (1, -1)),
    "transposed": lambda w, y, d: y.transpose(0, 1),
    "permuted": lambda w, y, d: y.permute(*reversed(range(y.dim()))),
    "unsqueezed": lambda w, y, d: y.unsqueeze(d.randrange(-1, y.dim())),
    "squeezed": lambda w, y, d: y.squeeze(),
    "narrow": lambda w, y, d: y.narrow(0, _start(d, y.shape[0]), 1),
    "a chunk": lambda w, y, d: y.chunk(2, 0)[0],
    "an item": lambda w, y, d: y.unbind(0)[0],
    "expanded": lambda w, y, d: y.expand(2, *y.shape),
    "detached": lambda w, y, d: y.detach(),
    "the data": lambda w, y, d: y.data,
    "an alias": lambda w, y, d: y.view_as(y),
    "a wrong view": lambda w, y, d: y.view(5, -1),
}
COPIES: dict[str, Step] = {
    "clone": lambda w, y, d: y.clone(),
    "torch.clone": lambda w, y, d: torch.clone(y),
    "contiguous": lambda w, y, d: y.contiguous(),
    "float": lambda w, y, d: y.float(),
    "double": lambda w, y, d: y.double(),
    "half precision": lambda w, y, d: y.bfloat16(),
    "to a dtype": lambda w, y, d: y.to(d.choice([torch.float32, torch.bfloat16, torch.float64])),
    "to a device": lambda w, y, d: y.to(d.choice(["cpu", torch.device("cpu")])),
    "to both": lambda w, y, d: y.to("cpu", torch.float32, non_blocking=True),
    "to another": lambda w, y, d: y.to(torch.ones(1, dtype=torch.float32)),
    "a copy to": lambda w, y, d: y.to("cpu", copy=True),
    "cpu": lambda w, y, d: y.cpu(),
    "type": lambda w, y, d: y.type(torch.float32),
    "type_as": lambda w, y, d: y.type_as(w.vector),
    "to meta": lambda w, y, d: y.to("meta").shape,
    "detached clone": lambda w, y, d: y.detach().clone(),
    "channels": lambda w, y, d: y.clone(memory_format=torch.contiguous_format),
    "a mask": lambda w, y, d: _masked(y, d),
    "numbers": lambda w, y, d: _chosen(y, d),
}
VALUES: dict[str, Step] = {
    "scaled": lambda w, y, d: y * 0.5,
    "scaled from the left": lambda w, y, d: 2 * y,
    "divided": lambda w, y, d: y / 3,
    "capped": lambda w, y, d: 3 * torch.tanh(y / 3),
    "with a vector": lambda w, y, d: y + w.vector,
    "with a number": lambda w, y, d: y + 1,
    "negative": lambda w, y, d: -y,
    "log-probabilities": lambda w, y, d: functional.log_softmax(y, -1),
    "log-probabilities, wide": lambda w, y, d: y.log_softmax(-1, dtype=torch.float32),
    "exp": lambda w, y, d: y.exp(),
    "filled": lambda w, y, d: y.masked_fill(y > 0, -1.0),
    "two together": lambda w, y, d: torch.cat([y, d.choice(w.tensors)]),
    "a sum of two": lambda w, y, d: y + d.choice(w.tensors),
    "squared": lambda w, y, d: Square.apply(y),
    "an operation": lambda w, y, d: torch.ops.aten.mul(y, 2.0),
}


def _written(y: Tensor, draw: Draw) -> None:
    key = draw.choice([0, (Ellipsis, 0), (slice(None), -1), (Ellipsis, slice(1, 3))])
    y[key] = draw.choice([50.0, -1.0])


def _without_gradient(w: World, y: Tensor, draw: Draw) -> None:
    with torch.no_grad():
        WRITES[draw.choice(["mul_", "an element", "copy_", "masked_fill_", "zero_"])](w, y, draw)


def _data(y: Tensor) -> None:
    y.data = y.data * 2


def _out(y: Tensor) -> None:
    with torch.no_grad():
        torch.add(torch.ones(y.shape, dtype=y.dtype), 1, out=y)


WRITES: dict[str, Step] = {
    "mul_": lambda w, y, d: (y.mul_(0.5), None)[1],
    "add": lambda w, y, d: (y.__iadd__(1), None)[1],
    "zero_": lambda w, y, d: (y.zero_(), None)[1],
    "an element": lambda w, y, d: _written(y, d),
    "masked_fill_": lambda w, y, d: (y.masked_fill_(_mask(tuple(y.shape), d), 2.0), None)[1],
    "copy_": lambda w, y, d: (y.copy_(torch.ones(y.shape[-1:])), None)[1],
    "index_put_": lambda w, y, d: (y.index_put_((torch.tensor([0]),), torch.tensor(3.0, dtype=y.dtype)), None)[1],
    "without a gradient": _without_gradient,
    "through data": lambda w, y, d: (y.data.mul_(3), None)[1],
    "data": lambda w, y, d: _data(y),
    "numpy": lambda w, y, d: y.detach().float().numpy().fill(7),
    "storage": lambda w, y, d: (y.detach().untyped_storage().fill_(0), None)[1],
    "out": lambda w, y, d: _out(y),
    "transpose_": lambda w, y, d: (y.transpose_(0, 1), None)[1],
    "unsqueeze_": lambda w, y, d: (y.unsqueeze_(0), None)[1],
    "squeeze_": lambda w, y, d: (y.squeeze_(), None)[1],
    "detach_": lambda w, y, d: (y.detach_(), None)[1],
    "requires_grad_": lambda w, y, d: (y.requires_grad_(d.random() < 0.5), None)[1],
    "operation_": lambda w, y, d: (torch.ops.aten.add_.Tensor(y, torch.ones((), dtype=y.dtype)), None)[1],
}


def _same_memory(w: World) -> list[int]:
    starts = [tensor.untyped_storage().data_ptr() for tensor in w.tensors]
    return [starts.index(start) for start in starts]


READS: dict[str, Step] = {
    "values": lambda w, y, d: y.detach().clone(),
    "largest": lambda w, y, d: y.argmax().item(),
    "list": lambda w, y, d: y.tolist(),
    "text": lambda w, y, d: repr(y),
    "version": lambda w, y, d: [tensor._version for tensor in w.tensors],
    "base": lambda w, y, d: [y.storage_offset(), y._is_view(), *(y._base is other for other in w.tensors)],
    "memory": lambda w, y, d: _same_memory(w),
    "equal": lambda w, y, d: torch.equal(y, d.choice(w.tensors)),
    "graph": lambda w, y, d: y.grad_fn.name(),
    "the same object": lambda w, y, d: [y.float() is y, y.contiguous() is y, y.to("cpu") is y],
    "strides": lambda w, y, d: [tensor.stride() for tensor in w.tensors],
    "length": lambda w, y, d: len(y),
}


def _labels(count: int, words: int, draw: Draw) -> Tensor:
    return torch.tensor([draw.choice([-100, draw.randrange(words)]) for _ in range(count)])


def _loss(w: World, y: Tensor, draw: Draw) -> None:
    rows = y.reshape(-1, y.shape[-1]) if draw.random() < 0.8 else y
    count = rows.shape[0] if rows.dim() == 2 else 1
    labels = _labels(count + (draw.random() < 0.05), max(rows.shape[-1], 1), draw)
    options: dict[str, Any] = {"reduction": draw.choice(["mean", "sum", "none"])}
    if draw.random() < 0.3:
        options["label_smoothing"] = 0.2
    if draw.random() < 0.05:
        labels = labels.float()
    w.losses.append(functional.cross_entropy(rows, labels, **options))


def _likelihood(w: World, y: Tensor, draw: Draw) -> None:
    logprobs = y.log_softmax(-1)
    index = torch.tensor([draw.randrange(VOCABULARY) for _ in range(y.shape[:-1].numel())])
    if draw.random() < 0.5:
        w.losses.append(functional.nll_loss(logprobs.view(-1, VOCABULARY), index, reduction="sum"))
    else:
        w.losses.append(logprobs.gather(-1, index.view(*y.shape[:-1], 1)).squeeze(-1))


def _loss_in_place(w: World, y: Tensor, draw: Draw) -> None:
    _loss(w, y, draw)
    w.losses[-1].mul_(2)


def _through(w: World, y: Tensor, draw: Draw) -> None:
    w.losses.append((y.float() * 0.5).square().sum())


LOSSES: dict[str, Step] = {
    "loss": _loss,
    "likelihood": _likelihood,
    "loss, scaled in place": _loss_in_place,
    "of the values": _through,
}


def _hooked(w: World, y: Tensor, draw: Draw) -> None:
    y.register_hook(lambda gradient: w.hooked.append(gradient.clone()))


def _weight(w: World, draw: Draw) -> None:
    weight = w.inputs[1]
    if draw.random() < 0.5:
        weight.data.mul_(1.5)
    else:
        weight.data = weight.detach() * 1.5


REST: dict[str, Step] = {
    "drop": lambda w, y, d: _drop(w, d),
    "retain": lambda w, y, d: y.retain_grad(),
    "hook": _hooked,
    "weight": lambda w, y, d: _weight(w, d),
}


def _drop(w: World, draw: Draw) -> None:
    if len(w.tensors) > 1:
        del w.tensors[draw.randrange(len(w.tensors))]


KINDS: list[tuple[dict[str, Step], float]] = [
    (VIEWS, 6),
    (COPIES, 5),
    (VALUES, 4),
    (WRITES, 3),
    (READS, 1.5),
    (LOSSES, 2.5),
    (REST, 0.4),
]


class Outcome(NamedTuple):
    """What a program produced."""

    trace: list[Any]
    values: list[Tensor]
    losses: list[Tensor]
    gradients: list[Any]
    hooked: list[Any]
    answered: bool
    half: bool
    refused: str


def _about(tensor: Tensor) -> tuple[Any, ...]:
    try:
        return tuple(tensor.shape), tensor.is_contiguous(), tensor.dtype, tensor.requires_grad, tensor.is_leaf
    except RuntimeError as error:  # A view of a tensor that was written into although it must not be.
        return (type(error).__name__,)


def run(seed: int, *, lazily: bool, until: int = 1000) -> Outcome:
    """Run the program of *seed*.

    Args:
        seed: The seed of everything that is drawn.
        lazily: Whether its logits are lazy.
        until: The most steps to take, so that this run can stop where the other one was refused.
    """
    w = World(seed, lazily=lazily)
    length = random.Random(f"length {seed}").randrange(2, 14)
    trace: list[Any] = []
    refused = ""
    for number in range(min(length, until)):
        draw = random.Random(f"{seed} {number}")
        kind = draw.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
        name, step = draw.choice(list(kind.items()))
        y = draw.choice(w.tensors)
        blind = draw.random() < 0.08
        try:
            with w.surroundings(), torch.set_grad_enabled(not blind):
                found = step(w, y, draw)
            raised = None
        except Exception as error:
            if lazily and REFUSED.search(str(error)):
                refused = f"{name}: {error}"
                break
            found, raised = None, type(error).__name__
        # An `autograd.Function` has its own path back to the inputs, so gradients are added in another order.
        w.answered |= kind is LOSSES or name == "squared"
        if kind in (VIEWS, COPIES, VALUES) and isinstance(found, Tensor):
            w.tensors.append(found)
            found = None
        trace.append((name, blind, raised, found, [_about(tensor) for tensor in w.tensors]))
    values, gradients = [], []
    if not refused:
        try:
            values = [tensor.detach().clone() for tensor in w.tensors]
            gradients = _gradients(w)
        except RuntimeError as error:
            gradients = [type(error).__name__]
            if lazily and REFUSED.search(str(error)):
                refused = f"the end: {error}"
    losses = [loss.detach().clone() for loss in w.losses]
    half = w.autocast or any(tensor.dtype == torch.bfloat16 for tensor in (*w.tensors, *w.inputs))
    return Outcome(trace, values, losses, gradients, w.hooked, w.answered, half, refused)


def _gradients(w: World) -> list[Any]:
    """The gradients of the inputs, from all losses and tensors."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in (*w.losses, *w.tensors):
        if tensor.requires_grad and tensor.is_floating_point():
            upstream = torch.linspace(-1, 1, max(tensor.numel(), 1), dtype=torch.float64)[: tensor.numel()]
            total = total + (tensor.double() * upstream.view(tensor.shape)).sum()
    if not total.requires_grad:
        return []
    total.backward()
    return [each.grad for each in w.inputs]


def differences(seed: int) -> tuple[list[str], str]:
    """The differences between lazy and plain logits, and why the lazy ones refused, if they did."""
    ours = run(seed, lazily=True)
    theirs = run(seed, lazily=False, until=len(ours.trace) if ours.refused else 1000)
    unlike = [
        f"step {number}, {one[0]}: {one[1:]} for {other[1:]}"
        for number, (one, other) in enumerate(zip(ours.trace, theirs.trace, strict=False))
        if not _same(one, other)
    ]
    if ours.refused:
        return unlike, ours.refused
    if len(ours.trace) != len(theirs.trace):
        unlike.append("they have other steps")
    unlike += [
        f"tensor {number} has other bits"
        for number, (one, other) in enumerate(zip(ours.values, theirs.values, strict=True))
        if not _same(one, other)
    ]
    for name, one, other in (("losses", ours.losses, theirs.losses), ("gradients", ours.gradients, theirs.gradients)):
        exact = not theirs.answered
        if name == "gradients" and theirs.answered and other and isinstance(other[0], str):
            continue  # On plain logits, a write between head and loss is an error; a kernel's loss does not see it.
        if not (_same(one, other) if exact else _close(one, other, theirs.half)):
            unlike.append(f"{name} differ: {one} for {other}")
    if not _close(ours.hooked, theirs.hooked, theirs.half):
        unlike.append("hooks got other gradients")
    return unlike, ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        if not alike or torch.equal(one, other):
            return alike
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other or (one != one and other != other))


def _close(one: list[Any], other: list[Any], half: bool) -> bool:
    """Whether they differ by no more than the proposal's roundings: 64 in float32, or 8 if half precision occurs."""
    share = 8 * torch.finfo(torch.bfloat16).eps if half else 64 * torch.finfo(torch.float32).eps
    if len(one) != len(other):
        return False
    for left, right in zip(one, other, strict=True):
        if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
            if left != right:
                return False
        elif (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        elif right.numel():
            size = max(right.double().abs().nan_to_num().max().item(), 1.0)
            if not torch.allclose(left.double(), right.double(), rtol=0, atol=share * size, equal_nan=True):
                return False
    return True
