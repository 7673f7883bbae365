"""Tells which tensors have memory that can be read."""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_private import is_functorch_wrapped_tensor


def not_dense(tensor: Tensor) -> str:
    """What *tensor* is, if it is not dense, as kernels need it; else ``""``."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    if tensor.is_quantized:
        return f"quantised to {tensor.dtype}"
    return "wrapped by torch.func" if is_functorch_wrapped_tensor(tensor) else ""


def readable(tensor: Tensor) -> bool:
    """Whether *tensor* has values: it is not on meta, and its memory has not been freed.

    FSDP frees the storage of a flattened parameter between calls and leaves the views. Reading such a view ends the
    process.
    """
    if tensor.is_meta:
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
        return True  # sparse and nested tensors hold their values in others, an empty one has none
    try:
        size = tensor.untyped_storage().size()
    except (RuntimeError, NotImplementedError):
        return True  # a wrapper, which has no memory of its own
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() <= size
