"""Small copies of large modules, for examples: behaviour does not depend on how large a hidden size is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_SIZE_WORDS = ("expert", "hidden", "size", "dim", "features", "shape")


class SmallCopies:
    """Maps the sizes of a module to small ones, equal sizes to equal ones, and makes tensors and modules of these.

    Args:
        sizes: Small sizes for some of the real ones.
        generator: The source of random numbers.
    """

    def __init__(self, sizes: Mapping[int, int], generator: torch.Generator) -> None:
        self._sizes = dict(sizes)
        self._generator = generator

    def size(self, real: int) -> int:
        """The small size for *real*; a size that is already small stays."""
        return self._sizes.setdefault(real, real if real <= 8 else 6 + len(self._sizes))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers, in float32 on the CPU."""
        return scale * torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def tensor(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A possible weight of the small size of *like*: its products with a row keep the row's magnitude."""
        shape = [self.size(dim) for dim in like.shape]
        if like.is_floating_point():
            return self.normal(*shape, scale=shape[-1] ** -0.5 if len(shape) > 1 else 0.5).to(dtype)
        return torch.zeros(shape, dtype=like.dtype, device="cpu")

    def module(self, real: nn.Module, dtype: torch.dtype) -> nn.Module:
        """A copy of *real* and all modules below it, with small tensors of *dtype*."""
        copy = object.__new__(type(real))
        makers: dict[str, Callable[[Any], Any]] = {
            "_parameters": lambda value: nn.Parameter(self.tensor(value, dtype), value.requires_grad),
            "_buffers": lambda value: self.tensor(value, dtype),
            "_modules": lambda value: self.module(value, dtype),
        }
        stores = {
            store: {name: None if value is None else make(value) for name, value in vars(real)[store].items()}
            for store, make in makers.items()
        }
        object.__setattr__(copy, "__dict__", vars(real) | self.attributes(real) | stores)
        return copy

    def attributes(self, real: nn.Module) -> dict[str, Any]:
        """The small values of all attributes of *real* that are sizes with a known small size, by name."""
        named = {name: value for name, value in vars(real).items() if any(word in name for word in _SIZE_WORDS)}
        sizes = {
            name: self._sizes[value] for name, value in named.items() if type(value) is int and value in self._sizes
        }
        shapes = {
            name: value for name, value in named.items() if type(value) is tuple and set(value) <= set(self._sizes)
        }
        return sizes | {name: tuple(self._sizes[size] for size in shape) for name, shape in shapes.items()}
