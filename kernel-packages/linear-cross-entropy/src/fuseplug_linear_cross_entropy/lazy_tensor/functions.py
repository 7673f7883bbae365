"""Functions of torch, grouped by what they ask of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .nested import leaves

ABOUT = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf")
        ),
        *(getattr(Tensor, f"is_{name}").__get__ for name in ("cpu", "cuda", "meta", "nested", "quantized", "sparse")),
        *(getattr(Tensor, name) for name in ("size", "dim", "ndimension", "numel", "nelement")),
        *(getattr(Tensor, name) for name in ("element_size", "is_contiguous", "is_complex", "is_floating_point")),
        *(getattr(Tensor, name) for name in ("get_device", "__len__", "__hash__")),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""Questions about a tensor that need no values. Strides are left out: those on meta differ for sizes of 1."""


CONVERSIONS = frozenset(
    getattr(Tensor, name) for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "clone")
) | {torch.clone}
"""Functions that give the same values in another dtype or elsewhere. So does the method named like the device."""

COPIES = frozenset({Tensor.clone, torch.clone, Tensor.detach, torch.detach})
"""Functions with which an `autograd.Function` passes a tensor on, so that its backward is called."""

GRAD_FN, BASE = (getattr(Tensor, name).__get__ for name in ("grad_fn", "_base"))
DEVICE = torch.ops.prim.device.default
_OWN_GRADIENT = frozenset({Tensor.retain_grad, Tensor.output_nr.__get__})  # type: ignore[attr-defined]
_GRADIENTS_OF = frozenset({torch.autograd.grad, torch.autograd.backward})
"""Functions that ask for the gradient of the tensor itself, and functions that ask for those of their ``inputs``."""

RUN_OTHERS = _GRADIENTS_OF | {Tensor.backward, Tensor.__repr__}
"""Functions that run code of others, such as the forward of a checkpoint."""


def asks_for_gradient(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
    """Whether *function* asks for the gradient of *tensor* itself."""
    if function in _GRADIENTS_OF:
        inputs = kwargs["inputs"] if "inputs" in kwargs else args[1:2]
        return any(leaf is tensor for leaf in leaves(inputs))
    return function in _OWN_GRADIENT


def name_of(function: Any) -> str:
    """The name by which a person knows *function*; for the getter of an attribute, the name of the attribute."""
    name = str(getattr(function, "__name__", function))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else name
