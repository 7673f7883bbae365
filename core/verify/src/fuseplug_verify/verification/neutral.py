"""Makes probing independent of the state around the call of ``apply_all``, and leaves that state unchanged."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Iterator

import torch

from ..process_lock import ProcessLock
from ..torch_private import disable_current_modes, function_modes_off

_alone = ProcessLock()


@contextlib.contextmanager
def neutral(
    device_type: str = "cpu", *, dtype: torch.dtype | None = torch.float32, random_kept: bool = False
) -> Iterator[None]:
    """Run the body in plain eager PyTorch, whatever the state outside: gradients on, no modes, no autocast.

    These settings are the calling thread's own. But *dtype* and what `same_random_numbers` sets belong to the whole
    process, so only one thread can be inside at a time.

    Args:
        device_type: The type of device for which autocast is turned off, besides the CPU.
        dtype: The default dtype inside, for code of models and kernels. It belongs to the whole process. If the default
            dtype outside is another, other threads see this one meanwhile, because PyTorch offers no other way. If it
            is this one already, or if *dtype* is ``None``, nothing is set.
        random_kept: Whether to restore the random state of the CPU and of *device_type* afterwards. It belongs to the
            whole process, too: numbers that other threads draw meanwhile, they draw again later.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone)
        stack.enter_context(function_modes_off())
        stack.enter_context(disable_current_modes())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for kind in dict.fromkeys(("cpu", device_type)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        # It is process-wide, so it is left alone if it is already the wanted one.
        if dtype is not None and dtype is not torch.get_default_dtype():
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        if random_kept:
            stack.enter_context(_random_state_kept(device_type))
        yield


@contextlib.contextmanager
def same_random_numbers(device_type: str) -> Iterator[None]:
    """Make the body draw the same random numbers each time, and restore the generators afterwards.

    The generators belong to the whole process, and a forward has no others. Another thread that draws meanwhile gets
    some of these numbers, and its own later. So enter this around one short run only, and only if it may draw.
    """
    with _random_state_kept(device_type):
        torch.default_generator.manual_seed(0)
        if device_type != "cpu":
            torch.get_device_module(device_type).manual_seed_all(0)
        yield


@contextlib.contextmanager
def _random_state_kept(device_type: str) -> Iterator[None]:
    """Restore the random state of the CPU and of *device_type* afterwards; on the CPU, only where somebody drew."""
    state, plain = torch.default_generator.get_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    numpys = numpy.random.get_state(legacy=False) if numpy else None
    devices = range(0 if device_type == "cpu" else torch.get_device_module(device_type).device_count())
    try:
        with torch.random.fork_rng(devices, device_type=device_type) if devices else contextlib.nullcontext():
            yield
    finally:
        if not torch.equal(torch.default_generator.get_state(), state):
            torch.default_generator.set_state(state)
        if random.getstate() != plain:
            random.setstate(plain)
        if numpy and pickle.dumps(numpy.random.get_state(legacy=False)) != pickle.dumps(numpys):
            numpy.random.set_state(numpys)
