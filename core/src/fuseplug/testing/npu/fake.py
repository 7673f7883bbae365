"""Tensors of an NPU that have no memory: shapes, dtypes and who has a gradient, for models of any size."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .contract import Contract
from .loading import load

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class FakeNPU(contextlib.AbstractContextManager["FakeNPU"]):
    """While it is entered, tensors are fake, torch_npu's schemas, metas and autograd formulas real, limits enforced.

    Raises:
        HostNPUUnavailable: When it is made, if it cannot be had here.
    """

    def __init__(self) -> None:
        load()
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(backward_in_this_thread())
            stack.enter_context(FakeTensorMode())
            stack.enter_context(Contract())  # type: ignore[no-untyped-call]
            self._held = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Fake tensors log a traceback for each call that is rejected, which is what tests provoke.
    level = _LOG.level
    _LOG.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _LOG.setLevel(level)


@contextlib.contextmanager
def backward_in_this_thread() -> Iterator[None]:
    """Run backward passes where they are asked for, not in a thread for the device.

    That thread would drop its reference to a dispatch mode, a Python object, when the interpreter may be gone.
    """
    with torch.autograd.set_multithreading_enabled(False):
        yield
