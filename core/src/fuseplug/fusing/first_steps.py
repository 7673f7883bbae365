"""After the first steps of training: whether the kernels that were put on are in use, said once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..patching import Applied

STEPS = 3
"""After how many steps of an optimizer that trains the model."""


@dataclass
class _Trained:
    model: weakref.ref[nn.Module]
    applied: Applied
    left: int = STEPS


class FirstSteps:
    """Looks at fused models after the first steps of their optimizers, and then no more.

    Its hook on optimizers stays: torch is going through the hooks when this one is called, and none may be removed.
    """

    def __init__(self) -> None:
        self._trained: list[_Trained] = []
        self._hooked = False

    def watch(self, model: nn.Module, applied: Applied) -> None:
        """Have `Applied.check_in_use` judge after the first steps of *model*."""
        self._trained.append(_Trained(weakref.ref(model), applied))
        if not self._hooked:
            register_optimizer_step_post_hook(self._stepped)
            self._hooked = True

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._trained:
            return
        parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for trained in [*self._trained]:
            model = trained.model()
            # A wrapper may train parameters of its own. Then nobody knows which steps are this model's.
            if model is not None and any(id(each) in parameters for each in model.parameters()):
                trained.applied.check_in_use(STEPS)
                trained.left -= 1
            if model is None or trained.left == 0:
                self._trained.remove(trained)
