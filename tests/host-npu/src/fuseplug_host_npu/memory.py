"""CPU tensors that share the memory of the stand-in's tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .torch_private import neg_view


def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor that shares the memory of *tensor*, which is on the stand-in: a write to one shows in both.

    Sizes, strides, offset, conjugation and negation are the same. The result keeps *tensor*, and so the memory, alive.
    """
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size or not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    window = (ctypes.c_char * size).from_address(storage.data_ptr())
    elements = torch.frombuffer(window, dtype=tensor.dtype, count=size // tensor.itemsize)
    host = elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    # Conjugation and negation are bits of the tensor, not bytes in its memory.
    if tensor.is_conj():
        host = host.conj()
    if tensor.is_neg():
        host = neg_view(host)
    window._tensor = tensor  # type: ignore[attr-defined] # torch.frombuffer keeps the window, and so the tensor, alive
    return host


def on_npu(tensor: Tensor) -> Tensor:
    """A copy of *tensor*, which is on the CPU, in new memory of the stand-in, with the same strides."""
    npu = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="npu")
    if tensor.numel():
        on_host(npu).copy_(tensor)
    return npu
