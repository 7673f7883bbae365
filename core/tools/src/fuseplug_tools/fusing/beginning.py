"""A forward pre-hook that is called when a model is called, and sees whether its training, or its use, has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fuseplug.contract import Mode

is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


class Beginning:
    """Calls *began* with the model if it is called as *mode* says, and not by a compiler.

    A copy of the model has the same hook.

    Args:
        began: Is given the model.
        mode: ``"training"``: calls with gradients; ``"inference"``: calls without.
    """

    def __init__(self, began: Callable[[nn.Module], None], mode: Mode = "training") -> None:
        self._began = began
        self._gradients = mode == "training"

    def __call__(self, module: nn.Module, _args: Any) -> None:
        """Be asked before *module* is called."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() is not self._gradients or is_tracing():
            return
        self._began(module)

    def put_on(self, module: nn.Module) -> None:
        """Ask at each call of *module*."""
        module.register_forward_pre_hook(self)

    def take_off(self, model: nn.Module) -> None:
        """Ask at no call of *model*, nor of a module in it."""
        for module in model.modules():
            hooks = module._forward_pre_hooks
            for number in [number for number, hook in hooks.items() if hook is self]:
                del hooks[number]

    def __deepcopy__(self, memo: Any) -> Beginning:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A model may be loaded where Fuseplug is not. The get of an empty dict is a hook, too: it returns its second
        # argument, and that is what the model is called with.
        return getattr, ({}, "get")
