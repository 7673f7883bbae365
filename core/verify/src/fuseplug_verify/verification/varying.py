"""Varies the examples of a candidate: other calls, and other values in the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..data import Example
from .nested import tensors, with_tensors

Kind = Literal["example", "rank", "length", "empty", "magnitude", "layout", "autocast", "keyword", "number"]

_LONG = 130
"""Longer than the examples, and not a round number."""

_LONGEST = 4096
"""Lengths in the code are tried up to here."""

_LARGEST = 1e30
_SMALL = 1e-8
"""A number in the code below this one separates small values from zero; a larger number is an eps or a factor."""

_MOST_NUMBERS = 6

FROZEN: Mapping[str, Any] = {"wants": lambda name: name.startswith("args")}
"""The options of `Subject.run` for a module whose weights are frozen, as under LoRA."""


@dataclass(frozen=True)
class Variation:
    """One more example.

    Attributes:
        kind: What is varied.
        label: How it is varied, in words.
        example: The example.
        options: The arguments with which `Subject.run` is to run the example.
        rank: The number of dimensions of its arguments, if that is varied.
    """

    kind: Kind
    label: str
    example: Example
    options: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0


def variations(
    example: Example, *, sizes: Iterable[int], numbers: Iterable[float], clamps: bool
) -> Iterator[Variation]:
    """Yield variations of *example*.

    Args:
        example: The example to vary.
        sizes: Lengths that the code mentions.
        numbers: Numbers that are written in the code.
        clamps: Whether the code treats some magnitudes differently from others, as far as can be read.
    """
    yield from _ranks(example)
    yield from _lengths(example, sizes)
    yield from _magnitudes(example, numbers, clamps)
    yield Variation("layout", "transposed in memory", example, {"arguments": transposed})
    yield Variation("layout", "at an odd place in memory", example, {"arguments": unaligned})
    yield Variation("layout", "and weights of which no gradient is wanted", example, FROZEN)
    yield Variation("autocast", "under autocast", example, {"autocast": True})


def main_argument(example: Example) -> int:
    """The number of the argument that is the main input: the first floating-point tensor, or else the first tensor."""
    tensors = [i for i, value in enumerate(example.args) if isinstance(value, Tensor)]
    floating = [i for i in tensors if example.args[i].is_floating_point() or example.args[i].is_complex()]
    return next(iter(floating or tensors))


def describe(example: Example) -> str:
    """The dtype and shape of the main input of *example*."""
    main = example.args[main_argument(example)]
    return f"{str(main.dtype).removeprefix('torch.')}{list(main.shape)}"


def transposed(value: Tensor) -> Tensor:
    """The same numbers, with two leading dimensions (of a matrix, both dimensions) exchanged in memory.

    A tensor that lies in memory in this way already is made contiguous.
    """
    if value.dim() < 2:
        return value.clone()
    first = value.dim() - 3 if value.dim() > 2 else 0
    exchanged = value.transpose(first, first + 1)
    if exchanged.is_contiguous() and not value.is_contiguous():
        return value.clone(memory_format=torch.contiguous_format)
    return exchanged.clone(memory_format=torch.contiguous_format).transpose(first, first + 1)


def unaligned(value: Tensor) -> Tensor:
    """The same numbers, stored one element after the beginning of their memory."""
    room = torch.cat((value.flatten()[:1], value.flatten()))
    return room[1:].view(value.shape) if value.numel() else value.clone()


def _ranks(example: Example) -> Iterator[Variation]:
    """One to five dimensions, if all tensor arguments have the same shape, of two dimensions or more."""
    inputs = tensors((tuple(example.args), dict(example.kwargs)))
    if len({tensor.shape for tensor in inputs}) > 1 or inputs[0].dim() < 2:
        return
    for lead in ((), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 3)):
        rows = torch.Size(lead).numel()

        def shaped(value: Tensor, lead: tuple[int, ...] = lead, rows: int = rows) -> Tensor:
            flat = value.reshape(-1, value.shape[-1])
            return flat.repeat(-(-rows // len(flat)), 1)[:rows].reshape(*lead, value.shape[-1])

        rank = len(lead) + 1
        yield Variation("rank", f"{rank} dimensions", _changed(example, shaped), rank=rank)


def _lengths(example: Example, sizes: Iterable[int]) -> Iterator[Variation]:
    """Each leading dimension of the main input with one, many and no elements, and with lengths from the code; one row.

    A kernel may have a path of its own for the one row of a decoded token.
    """
    main = example.args[main_argument(example)]
    named = sorted({size + d for size in sorted(sizes)[:_MOST_NUMBERS] for d in (0, 1) if 0 < size + d <= _LONGEST})
    leading, single = main.shape[:-1], example
    for dim in range(len(leading)):
        for length in dict.fromkeys((1, _LONG, *named, 0)):
            resized = _resizing(leading, dim, length)
            kind: Kind = "length" if length else "empty"
            yield Variation(kind, f"{length} in dimension {dim}", _changed(example, resized))
        single = _changed(single, _resizing(torch.Size((1,) * dim + leading[dim:]), dim, 1))
    if len(leading) > 1:
        yield Variation("length", "of one row", single)


def _resizing(leading: torch.Size, dim: int, length: int) -> Callable[[Tensor], Tensor]:
    """A function that gives dimension *dim* of the main input, and of tensors that go with it, another *length*.

    It repeats or cuts what is there. *leading* are the leading dimensions of the main input. A tensor goes with it if
    it has the same leading dimensions, or as many with the same extent of *dim*. Of any other tensor, a dimension that
    has one row for each row of the main input is changed, or else each dimension with the extent of *dim*.
    """
    rows = leading.numel()
    rows_then = rows // max(1, leading[dim]) * length

    def resized(value: Tensor) -> Tensor:
        shape = value.shape[: max(1, value.dim() - 1)]
        alike = len(shape) == len(leading) and shape[dim] == leading[dim]
        if alike or (value.dim() > len(leading) and shape == leading):
            return _repeated(value, dim, length)
        wanted, then = (rows, rows_then) if rows in shape else (leading[dim], length)
        for axis, extent in enumerate(shape):
            if extent == wanted:
                value = _repeated(value, axis, then)
        return value

    return resized


def _repeated(value: Tensor, dim: int, length: int) -> Tensor:
    times = [1] * value.dim()
    times[dim] = -(-length // max(1, value.shape[dim]))
    return value.repeat(*times).narrow(dim, 0, length)


def _magnitudes(example: Example, numbers: Iterable[float], clamps: bool) -> Iterator[Variation]:
    main = example.args[main_argument(example)]
    if not main.is_floating_point():
        return
    named = {abs(number) for number in numbers}
    large = sorted((number for number in named if 1 < number < _LARGEST), reverse=True)[:_MOST_NUMBERS]
    small = sorted(number for number in named if 1 / _LARGEST < number < _SMALL)[:_MOST_NUMBERS]
    for factor in dict.fromkeys((1e4, 1e-4, *(4 * number for number in large), *small)):
        yield Variation("magnitude", f"of magnitude {factor:.3g}", _scaled(example, factor))
    # Padding has zeros, and a ReLU leaves them.
    yield Variation("magnitude", "with zeros in it", _scaled(example, 1.0, 0.0))
    yield Variation("magnitude", "of zeros", _scaled(example, 0.0))
    for special in (torch.inf, -torch.inf, torch.nan) if clamps else ():
        yield Variation("magnitude", f"with {special} in it", _scaled(example, 1.0, special))


def _scaled(example: Example, factor: float, special: float | None = None) -> Example:
    """*example* with the main input times *factor*; its first element is *special*, if that is given."""
    at = main_argument(example)
    main = example.args[at] * factor
    if special is not None:
        main[(0,) * main.dim()] = special
    return replace(example, args=[main if i == at else value for i, value in enumerate(example.args)])


def _changed(example: Example, change: Callable[[Tensor], Tensor]) -> Example:
    args, kwargs = with_tensors(change, (list(example.args), dict(example.kwargs)))
    return replace(example, args=args, kwargs=kwargs)
