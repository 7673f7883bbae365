"""The outcome of a function of tensors, to be compared with the outcome of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fuseplug_verify import Outcome


def outcome(
    function: Callable[..., Any], tensors: Mapping[str, Tensor], device: str = "cpu", dtype: torch.dtype | None = None
) -> Outcome:
    """The results of *function* for *tensors*, which are passed by name, and the gradient of each tensor."""
    leaves = {name: tensor.detach().to(device, dtype, copy=True).requires_grad_() for name, tensor in tensors.items()}
    result = function(**leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    generator = torch.Generator().manual_seed(1)
    # Eighths of small integers are the same numbers in every dtype.
    upstream = [torch.randint(-15, 16, y.shape, generator=generator).div(8).to(y.device, y.dtype) for y in outputs]
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    values: dict[str, Tensor | None] = {f"output {number}": y.detach() for number, y in enumerate(outputs)}
    return Outcome(values | {f"gradient of {name}": each for name, each in zip(leaves, found, strict=True)})
