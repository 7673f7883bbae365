"""What is compared: one op at one shape, and its implementations."""

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
"""The most roundings that one of our own kernels asks for in one row."""

Function = Callable[..., Any]
"""Takes the arguments of a problem, and returns a tensor or a tuple of tensors."""


class Kind(NamedTuple):
    """The device and the dtype of tensors."""

    device: torch.device
    dtype: torch.dtype


class Least(NamedTuple):
    """The least that a work needs: the bytes that it must read and write, and its multiplications and additions."""

    bytes: float
    flops: float = 0.0


@dataclass
class Problem:
    """One op at one shape.

    Attributes:
        shape: The shape, in words.
        arguments: The arguments as a model has them. Those that have gradients require them.
        upstream: The gradients of the results.
        exact: The op in plain PyTorch, for arguments of any dtype.
        least: The least that each work needs.
        wide: The dtype in which *exact* is the truth.
        by_row: Whether each row is judged by its own magnitude, or all rows by the tensor's. Where results are sums,
            the parts of a row may almost cancel.
        roundings: How many roundings to the dtype of a result a right implementation may accumulate.
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
        name: Its name in the tables.
        make: Returns the function for given arguments. Raises ImportError if the implementation is not installed, and
            `LeftOut` if it is installed but should not take part.
        writes: Whether the function overwrites its arguments, as some do to save memory. If so, it gets copies, made
            anew before each call, untimed.
    """

    name: str
    make: Callable[[Sequence[Tensor]], Function]
    writes: bool = False


class LeftOut(Exception):
    """A contender does not take part, for the reason that the message gives."""


@dataclass(frozen=True)
class Op:
    """One op: its shapes, the most telling ones first, and its contenders.

    Attributes:
        problem: Makes the `Problem` of one of the shapes.
        shapes: The shapes that are measured.
        single: The shape with one token.
        tiny: Shapes on which the benchmark itself is checked, without a GPU.
        contenders: The implementations, `OURS` and `EAGER` among them.
        applied: The module after `manager.apply_all`: the same kernel, called as a model calls it.
        aim: Returns what ours must reach, by shape, work, and the least that the work needs.
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
    """The results of a function, as a tuple."""
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
    """Normally distributed numbers, because a GPU multiplies zeros faster."""
    return torch.randn(shape, device=where.device, dtype=where.dtype)
