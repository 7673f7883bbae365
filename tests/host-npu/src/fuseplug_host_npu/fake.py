"""NPU tensors without memory: they show shapes, dtypes and which of them have gradients, for models of any size."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .loading import load
from .machine import Machine, entered

if TYPE_CHECKING:
    from typing import Self


class FakeNPU(contextlib.AbstractContextManager["FakeNPU"]):
    """A context in which tensors are fake; torch_npu's schemas, metas and autograd formulas are real; limits hold.

    Args:
        **the_machine: The fields of `fuseplug_host_npu.Machine`: ``soc``, ``vector_cores``, ``lacking``.

    Raises:
        HostNPUUnavailable: At construction, if this machine cannot run the stand-in.
    """

    def __init__(self, **the_machine: Any) -> None:
        load()
        self.machine = Machine(**the_machine)
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        from torch.autograd import set_multithreading_enabled

        from .contract import Contract
        from .torch_private import FakeTensorMode

        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            entered.append(self.machine)
            stack.callback(entered.remove, self.machine)
            # The device's autograd thread would drop its reference to a mode, a Python object, perhaps after the
            # interpreter is gone.
            stack.enter_context(set_multithreading_enabled(False))
            stack.enter_context(FakeTensorMode())
            stack.enter_context(Contract())  # type: ignore[no-untyped-call]
            self._held = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Fake tensors log a traceback for each rejected call, and tests provoke such calls.
    from .torch_private import FAKE_TENSOR_LOG

    log = logging.getLogger(FAKE_TENSOR_LOG)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
