"""Says which calls Liger can serve, and launches its functions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseplug_backends.dtypes import have_model_dtypes
from fuseplug_backends.tracing import is_fake
from fuseplug_backends.triton import interpreted, transparent

WIDEST = 1 << 16
"""The most elements of a row: Liger raises an error for more."""


# Triton's interpreter keeps the program that it runs in globals.
_in_turn: contextlib.AbstractContextManager[Any] = threading.RLock() if interpreted() else contextlib.nullcontext()


def serves(*tensors: Tensor | None) -> bool:
    """Whether Liger can be called with *tensors*: not empty, in a dtype that it has, and not to be traced."""
    return (
        not torch.compiler.is_compiling()
        and have_model_dtypes(*tensors)
        and all(t is None or (t.numel() > 0 and not is_fake(t)) for t in tensors)
        and transparent(*tensors)
    )


def launch(function: Callable[..., Any], on: Tensor, *arguments: Any, **options: Any) -> Any:
    """Call *function* of Liger while the device of *on* is the current device.

    Some of Liger's functions launch on the current device, wherever their tensors are.
    """
    index = on.device.index
    with _in_turn:
        if index is None or index == torch.accelerator.current_device_index():
            return function(*arguments, **options)
        with torch.accelerator.device_index(index):
            return function(*arguments, **options)


def unseen_as_view(result: Tensor) -> Tensor:
    """*result* as a tensor that is no view: torch forbids writing into a view that an autograd function's forward made.

    No other tensor has the memory of *result*.
    """
    return result.data
