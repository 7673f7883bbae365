"""LayerNorm, compiled by Inductor."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.inductor import Compiled, worth_compiling

from . import reference

_compiled = Compiled(reference.layer_norm)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, variant: str) -> Tensor:
    """The same as the reference, compiled.

    Traced and small calls go to the reference. So do calls under autocast: it changes the result of
    `torch.nn.functional.layer_norm`, and compiled programs do not see it.
    """
    if torch.is_autocast_enabled(x.device.type) or not worth_compiling(x.shape, x, weight, bias):
        return by_reference(reference.layer_norm, x, weight, bias, eps, variant)
    return _compiled((eps, variant), x, weight, bias)  # the program contains the numbers
