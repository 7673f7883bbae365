"""Moves each result that a kernel would give by one rounding, to see how far the model moves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@contextlib.contextmanager
def one_rounding(modules: Iterable[nn.Module], draw: int = 0) -> Iterator[None]:
    """Move each input and output of *modules*, and each gradient on its way back, by one rounding.

    Each *draw* moves them differently.
    """
    generator = torch.Generator().manual_seed(draw)

    def moved(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return _Moved.apply(value, generator) if torch.is_grad_enabled() else _move(value, generator)

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(moved, (args, kwargs))

    def after(_module: nn.Module, _args: Any, result: Any) -> Any:
        return pytree.tree_map(moved, result)

    with contextlib.ExitStack() as hooks:
        for module in modules:
            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ):
                hooks.callback(handle.remove)
        yield


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return _move(value, generator)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _move(gradient, ctx.generator), None


def _move(value: Tensor, generator: torch.Generator) -> Tensor:
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    eps = torch.finfo(value.dtype).eps
    share = torch.rand(value.shape, generator=generator, dtype=wide.dtype).mul_(2 * eps).sub_(eps)
    return (wide + wide * share.to(value.device)).to(value.dtype)
