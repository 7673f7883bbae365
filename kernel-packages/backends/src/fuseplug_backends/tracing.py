"""Whether tracers, transforms or hooks observe the function of a kernel. For them, the kernel uses its reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .torch_private import (
    GLOBAL_HOOKS,
    FakeTensor,
    get_unwrapped,
    in_forward_mode,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    len_torch_dispatch_stack,
    peek_interpreter_stack,
)

is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]

__all__ = [
    "are_modules_hooked",
    "is_batch_of_gradients",
    "is_fake",
    "is_mapped",
    "is_traced",
    "is_transformed",
    "is_watched",
    "is_wrapped",
    "transparent",
]


def is_traced() -> bool:
    """Whether ``torch.compile``, ``torch.export`` or ``torch.jit.trace`` traces the call."""
    return torch.compiler.is_compiling() or is_tracing()


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode differentiation is at work, outside of ``torch.compile``."""
    return not torch.compiler.is_compiling() and (peek_interpreter_stack() is not None or in_forward_mode())


def is_watched() -> bool:
    """Whether something sees each operation here: a tracer, a transform, forward-mode differentiation, or a mode."""
    return is_traced() or is_transformed() or len_torch_dispatch_stack() > 0


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func` made *tensor* as a wrapper of another; its type is `Tensor` all the same."""
    return is_functorch_wrapped_tensor(tensor)


def is_mapped(*tensors: Tensor) -> bool:
    """Whether `torch.func.vmap` maps over one of *tensors*, so that a value in that tensor is not one number."""
    for tensor in tensors:
        while is_functorch_wrapped_tensor(tensor):
            if is_batchedtensor(tensor):
                return True
            tensor = get_unwrapped(tensor)
    return False


def is_batch_of_gradients(tensor: Tensor) -> bool:
    """Whether *tensor* is a batch of gradients, as ``torch.autograd.grad(is_grads_batched=True)`` makes them."""
    return is_legacy_batchedtensor(tensor)


def is_fake(tensor: Tensor) -> bool:
    """Whether *tensor* has no values, but is a plain tensor in every other way."""
    return type(tensor) is FakeTensor


def are_modules_hooked() -> bool:
    """Whether there are hooks for all modules, as ``torch.nn.modules.module.register_module_…_hook`` adds them."""
    return any(GLOBAL_HOOKS)


def transparent(*tensors: Tensor | None) -> bool:
    """Whether a kernel may be launched for *tensors* and their gradients, here and now.

    Kernels read the memory of plain tensors on one device. ``torch.jit.trace``, functorch transforms and forward-mode
    differentiation need to see the operations; subclasses such as DTensor bring operations of their own. For these, for
    a batch of gradients as ``is_grads_batched=True`` makes it, and for a tensor whose memory holds its negative, such
    as ``z.conj().imag``, the caller uses its reference.
    """
    tracing = torch.compiler.is_compiling()
    device = None
    for tensor in tensors:  # a generator would take the host longer than all the rest
        if tensor is None:
            continue
        device = device or tensor.device
        readable = tracing or (type(tensor) in _READABLE and not (is_batch_of_gradients(tensor) or tensor.is_neg()))
        if not readable or tensor.device != device:
            return False
    return tracing or not (is_tracing() or is_transformed())


_READABLE = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""The types of tensors that a kernel may be launched for. An operation never reads the memory of a fake tensor."""
