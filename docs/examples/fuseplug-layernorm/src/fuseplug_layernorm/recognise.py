"""Finds LayerNorm in a model, and calls the kernel there.

The structure of a module counts, never the name of its class. Fuseplug then runs the module to decide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuseplug import Adapter, Compute, Example, Proposal, Site, Target
from fuseplug_backends.dtypes import MODEL_DTYPES

_LARGEST_EPS = 1e-2


@dataclass(frozen=True)
class LayerNormAdapter(Adapter):
    """Calls the kernel as the module calls its own code.

    It holds the names of attributes, not their values, so that all norms of a model have equal adapters.
    """

    variant: str
    weight: str
    bias: str | None
    eps: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The names that `bind` reads from the module."""
        return tuple(name for name in (self.weight, self.bias, self.eps) if name is not None)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, x)``."""
        variant, weight, bias, eps = self.variant, self.weight, self.bias, self.eps

        def forward(module: nn.Module, x: torch.Tensor) -> Any:
            shift = None if bias is None else getattr(module, bias)
            return compute(x, getattr(module, weight), shift, getattr(module, eps), variant)

        return forward


def match(site: Site) -> list[Proposal] | None:
    """Propose every module with one or two vectors of one length, one small number, no buffers and no children."""
    module = site.module
    vectors = {name: each for name, each in module._parameters.items() if each is not None}
    epsilons = [name for name, each in vars(module).items() if type(each) is float and 0 < each <= _LARGEST_EPS]
    if module._modules or module._buffers or len(epsilons) != 1 or len(vectors) not in (1, 2):
        return None
    (dtype, shape), *others = {(each.dtype, tuple(each.shape)) for each in vectors.values()}
    if others or len(shape) != 1 or dtype not in MODEL_DTYPES:
        return None
    weight, *rest = vectors
    bias = rest[0] if rest else None
    variants = ("torch",) if bias else ("torch", "cohere")
    return [
        Proposal(
            Target(),
            tuple(LayerNormAdapter(variant, weight, bias, epsilons[0]) for variant in variants),
            functools.partial(example, shape[0], tuple(vectors), getattr(module, epsilons[0])),
            # First the module's own dtype, then the others in which a model may call it.
            mixes=sorted(MODEL_DTYPES, key=lambda other: other is not dtype),
            roundings=3.0,  # the product, the sum and the result: a kernel may round after each
            working_roundings=16.0 + math.sqrt(_MOST_CHECKED / shape[0]) / 4,  # second term: a gradient sums all rows
        )
    ]


_MOST_CHECKED = 1 << 20
"""Elements of the largest input on which Fuseplug checks the kernel."""


def example(
    width: int, names: Sequence[str], eps: float, dtype: torch.dtype, size: int, generator: torch.Generator
) -> Example:
    """Rows that are large, or small compared with √eps, with a mean other than 0; weights that are neither 1 nor 0."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    tokens = max(3, math.ceil(size / width / 2))
    magnitudes = torch.tensor([1.0, math.sqrt(eps), 16.0, math.sqrt(eps) / 4], device="cpu")
    scale = magnitudes.repeat(math.ceil(tokens / 2))[: 2 * tokens].view(2, tokens, 1)
    parameters = {name: (1.0 + 0.3 * normal(width)).to(dtype) for name in names}
    return Example(((scale * (1.0 + normal(2, tokens, width))).to(dtype),), parameters)
