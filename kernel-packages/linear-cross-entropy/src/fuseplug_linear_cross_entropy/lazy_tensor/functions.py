"""Functions of torch, by what they ask of a tensor."""

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
"""What is asked about a tensor, and answered without its values. Not strides: meta has others for sizes of 1."""


CONVERSIONS = frozenset(
    getattr(Tensor, name) for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "clone")
) | {torch.clone}
"""What gives the same values in another dtype or elsewhere; so does the method that is named like the device."""

COPIES = frozenset({Tensor.clone, torch.clone, Tensor.detach, torch.detach})
"""What an `autograd.Function` passes a tensor on with, to be called in the backward."""

GRAD_FN, BASE = (getattr(Tensor, name).__get__ for name in ("grad_fn", "_base"))
DEVICE = torch.ops.prim.device.default
_OWN_GRADIENT = frozenset({Tensor.retain_grad, Tensor.output_nr.__get__})  # type: ignore[attr-defined]
_GRADIENTS_OF = frozenset({torch.autograd.grad, torch.autograd.backward})
"""What asks for the gradient of the tensor itself, or of its ``inputs``."""

RUN_OTHERS = _GRADIENTS_OF | {Tensor.backward, Tensor.__repr__}
"""What runs others' code, a checkpoint's forward for example."""


def asks_for_gradient(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
    """Whether *function* asks for the gradient of *tensor* itself."""
    if function in _GRADIENTS_OF:
        inputs = kwargs["inputs"] if "inputs" in kwargs else args[1:2]
        return any(leaf is tensor for leaf in leaves(inputs))
    return function in _OWN_GRADIENT


def name_of(function: Any) -> str:
    """The name of *function*, as a person knows it; of the getter of an attribute, that of the attribute."""
    name = str(getattr(function, "__name__", function))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else name
