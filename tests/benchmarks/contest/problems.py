"""What is compared: one op at one shape, and the implementations that take part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
WORKS = (FORWARD, BACKWARD, BOTH)

OURS, LIGER, EAGER, COMPILED = "fuseplug", "Liger-Kernel", "eager", "torch.compile"

ROUNDINGS = 6
"""The most that one of our own kernels asks for, in one row."""

Function = Callable[..., Any]
"""Takes the arguments of a problem; gives a tensor or a tuple of them."""


class Kind(NamedTuple):
    """Where tensors are, and of what dtype."""

    device: torch.device
    dtype: torch.dtype


class Least(NamedTuple):
    """What a work cannot do with less of: the bytes that it must read and write, and its multiplications and sums."""

    bytes: float
    flops: float = 0.0


@dataclass
class Problem:
    """One op at one shape.

    Attributes:
        shape: In words.
        arguments: As a model has them; those with gradients require them.
        upstream: The gradients of the results.
        exact: The op in plain PyTorch, for arguments of any dtype.
        least: By work.
        wide: The dtype in which *exact* is the truth.
        by_row: Whether each row is judged by its own magnitude, or all by that of the tensor: where results are sums of
            parts, the parts of a row may all but cancel.
        roundings: To the dtype of a result, that a right implementation may accumulate.
    """

    shape: str
    arguments: tuple[Tensor, ...]
    upstream: tuple[Tensor, ...]
    exact: Function
    least: Mapping[str, Least]
    wide: torch.dtype = torch.float64
    by_row: bool = True
    roundings: int = ROUNDINGS

    def widened(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Arguments and upstream gradients in the dtype of the truth."""

        def widen(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().to(self.wide).requires_grad_(tensor.requires_grad)

        return tuple(map(widen, self.arguments)), tuple(map(widen, self.upstream))


@dataclass(frozen=True)
class Contender:
    """One implementation.

    Attributes:
        name: What the tables call it.
        make: Gives the function for certain arguments. Raises ImportError where it is not installed, and `LeftOut`
            where it is but should not take part.
        writes: Whether it overwrites what it is given, as some do to save memory: then it gets copies, made anew for
            each call, outside of what is timed.
    """

    name: str
    make: Callable[[Sequence[Tensor]], Function]
    writes: bool = False


class LeftOut(Exception):
    """A contender does not take part, for the reason that the message gives."""


@dataclass(frozen=True)
class Op:
    """One op: its shapes, the most telling ones first, and who takes part.

    Attributes:
        problem: Makes the `Problem` of one of the shapes.
        shapes: What is measured.
        single: The shape with one token.
        tiny: Shapes on which the benchmark itself is checked, without a GPU.
        contenders: `OURS` and `EAGER` are among them.
        applied: What `manager.apply_all` makes of the module; it is the same kernel, called as a model calls it.
        aim: What is asked of ours, by shape, work, and the least of that.
    """

    name: str
    problem: Callable[[Any, Kind], Problem]
    shapes: Sequence[Any]
    single: Any
    tiny: Sequence[Any]
    contenders: Sequence[Contender]
    applied: Contender
    aim: Callable[[Any, str, Least], Any]


def results(out: Any) -> tuple[Tensor, ...]:
    """What a function gave, as a tuple."""
    return out if isinstance(out, tuple) else (out,)


def leaves(arguments: Sequence[Tensor]) -> list[Tensor]:
    """The arguments that have gradients."""
    return [argument for argument in arguments if argument.requires_grad]


def forward(function: Function, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return results(function(*arguments))


def backward(out: Sequence[Tensor], arguments: Sequence[Tensor], upstream: Sequence[Tensor]) -> tuple[Tensor, ...]:
    wanted = leaves(arguments)
    return torch.autograd.grad(out, wanted, upstream) if wanted else ()


def both(function: Function, arguments: Sequence[Tensor], upstream: Sequence[Tensor]) -> tuple[Tensor, ...]:
    out = results(function(*arguments))
    return (*(y.detach() for y in out), *backward(out, arguments, upstream))


def normal(where: Kind, *shape: int) -> Tensor:
    """Normally distributed numbers: of zeros a GPU multiplies more in the same time."""
    return torch.randn(shape, device=where.device, dtype=where.dtype)
