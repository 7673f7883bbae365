"""A module of a model, and what is known about the sizes that its inputs must have."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

LENGTH = 12
"""The number of tokens, or vectors, in a row."""


@dataclass(eq=False)
class Submodule:
    """The module of *model* at *path*; ``""`` is the path of the model itself."""

    model: nn.Module
    path: str = ""

    @cached_property
    def module(self) -> nn.Module:
        return self.model.get_submodule(self.path)

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters of the module's forward, by name."""
        return dict(inspect.signature(self.module.forward).parameters)

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the parameters that must be given."""
        return tuple(
            n for n, p in self.parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        )

    @cached_property
    def configs(self) -> list[Any]:
        """The configs that may describe the module, the nearest first, each followed by the configs within it."""
        names = self.path.split(".") if self.path else []
        above = [self.model.get_submodule(".".join(names[:n])) for n in range(len(names), -1, -1)]
        return list({id(c): c for m in above for c in _nested(getattr(m, "config", None))}.values())

    def number(self, *names: str, default: int) -> int:
        """The first number that a config has under one of *names*; of a list or dictionary, its first element."""
        for config in self.configs:
            for name in names:
                value = getattr(config, name, None)
                value = next(iter(value.values()), None) if isinstance(value, dict) else value
                value = value[0] if isinstance(value, list | tuple) and value else value
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    def first(self, *kinds: type[nn.Module]) -> nn.Module | None:
        """The first module of one of *kinds*, from this module down."""
        return next((m for m in self.module.modules() if isinstance(m, kinds)), None)

    def named(self, names: Collection[str]) -> list[nn.Module]:
        """The modules below this one that have one of *names*; this module if none has."""
        found = [m for path, m in self.module.named_modules() if path.rpartition(".")[2] in names]
        return found or [self.module]

    @property
    def width(self) -> int:
        """The width of the vectors for the first weight in the module; without one, the width in a config, or 64."""
        for module in self.module.modules():
            if isinstance(module, nn.Linear):
                return module.in_features
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor):
                return weight.shape[-1]
        return self.number("hidden_size", "d_model", "embed_dim", default=64)


def noise(*shape: int) -> Tensor:
    """Random numbers, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _nested(config: Any) -> Iterator[Any]:
    level = [config] if isinstance(config, PretrainedConfig) else []
    while level:
        yield from level
        level = [v for c in level for v in vars(c).values() if isinstance(v, PretrainedConfig)]
