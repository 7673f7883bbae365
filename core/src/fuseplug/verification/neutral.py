"""Probing must not depend on what surrounds the call to ``apply_all``, and must leave no trace in it."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

_alone = threading.RLock()


@contextlib.contextmanager
def neutral(device_type: str = "cpu") -> Iterator[None]:
    """Plain eager PyTorch inside, whatever is ambient: gradients on, no modes, no autocast, float32 by default.

    Random state, of the CPU and of *device_type*, is what it was afterwards. One thread at a time: the default dtype
    and the generators are the whole process's.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone)
        stack.enter_context(_function_modes_off())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for kind in {"cpu", device_type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(random_state_kept(kind))
        stack.enter_context(_default_dtype(torch.float32))
        yield


def seed(device_type: str) -> None:
    """Put the generators that a forward may draw from at one fixed point."""
    torch.default_generator.manual_seed(0)
    if device_type != "cpu":
        torch.get_device_module(device_type).manual_seed_all(0)


@contextlib.contextmanager
def _function_modes_off() -> Iterator[None]:
    # ``with torch.device("meta"):`` is such a mode. Taken off the stack rather than disabled: Dynamo guards on whether
    # torch functions are disabled, and a kernel compiled here would be compiled again at run time.
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def random_state_kept(device_type: str) -> Iterator[None]:
    """Random state, of the CPU or of *device_type*, is afterwards what it was."""
    if device_type == "cpu":
        state, plain = torch.default_generator.get_state(), random.getstate()
        numpy = sys.modules.get("numpy")
        numpys = numpy.random.get_state() if numpy else None
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
            random.setstate(plain)
            if numpy:
                numpy.random.set_state(numpys)
    else:
        devices = range(torch.get_device_module(device_type).device_count())
        with torch.random.fork_rng(devices, device_type=device_type):
            yield


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    # Process-wide in PyTorch, so it is left alone where it already is what is wanted.
    ambient = torch.get_default_dtype()
    if ambient is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(ambient)
