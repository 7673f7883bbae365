"""A forward pre-hook that notices when the training of a model, or its use, begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fuseplug.contract import Mode

is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


class Beginning:
    """Calls *began* with the model when somebody calls the model as *mode* says, unless a compiler traces the call.

    A copy of the model has the same hook.

    Args:
        began: Called with the model.
        mode: ``"training"``: calls with gradients; ``"inference"``: calls without.
    """

    def __init__(self, began: Callable[[nn.Module], None], mode: Mode = "training") -> None:
        self._began = began
        self._gradients = mode == "training"

    def __call__(self, module: nn.Module, _args: Any) -> None:
        """Report *module*, which is about to be called, unless the call is of the other mode or traced."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() is not self._gradients or is_tracing():
            return
        self._began(module)

    def put_on(self, module: nn.Module) -> None:
        """Put the hook on *module*."""
        module.register_forward_pre_hook(self)

    def take_off(self, model: nn.Module) -> None:
        """Take the hook off *model* and every module in it."""
        for module in model.modules():
            hooks = module._forward_pre_hooks
            for number in [number for number, hook in hooks.items() if hook is self]:
                del hooks[number]

    def __deepcopy__(self, memo: Any) -> Beginning:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A model may be loaded where Fuseplug is not installed. There, the `get` of an empty dict is the hook: it
        # returns its second argument, which is the arguments of the call.
        return getattr, ({}, "get")
