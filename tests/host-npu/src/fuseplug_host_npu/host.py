"""An NPU in host memory: torch_npu as it is, with the kernels of the CPU in the place of those of the device."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from .limits import check
from .loading import load
from .machine import Machine, entered, machine

if TYPE_CHECKING:
    from typing import Self

    from .torch_private import OpOverload


class HostNPU:
    """While it is entered, ops on tensors of device ``npu`` are computed, by the CPU, in the same memory.

    What is replaced is the lowest layer, one kernel an op. All above is torch_npu's own: schemas, autograd formulas,
    autocast, what ``torch.compile`` traces, `torch.npu`. So it is for the whole process, every thread included, and
    there is nothing of it left when the last one is exited.

    An op of torch_npu for which there is no reference raises `NotImplementedError`; `fuseplug_host_npu.reference`
    adds one. An op of torch which torch_npu has no kernel for is left to torch, as on an NPU.

    Args:
        contract: Whether calls that break a limit raise `ContractError`. The one entered last decides.
        **the_machine: The fields of `fuseplug_host_npu.Machine`: ``soc``, ``vector_cores``, ``lacking``.

    Attributes:
        machine: The machine that is stood in for. The one entered last decides.
        calls: How often each op was run since it was entered: ``calls["npu_rms_norm"]``, ``calls["aten::mm"]``.

    Raises:
        HostNPUUnavailable: When it is made, if it cannot be had here.
    """

    _entered: ClassVar[list[HostNPU]] = []
    _lock: ClassVar = threading.RLock()

    def __init__(self, *, contract: bool = True, **the_machine: Any) -> None:
        load()
        self.contract = contract
        self.machine = Machine(**the_machine)
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Self:
        from .kernels import KERNELS

        self.calls.clear()
        with self._lock:
            if not self._entered:
                _name_of_the_chip.put()
            self._entered.append(self)
            entered.append(self.machine)
            KERNELS.put(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        from .kernels import KERNELS

        with self._lock:
            self._entered.remove(self)
            entered.remove(self.machine)
            if not self._entered:
                _name_of_the_chip.take_away()
                _wait_for_autograd()
                KERNELS.take_away()

    @classmethod
    def _called(cls, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call for each that is entered, and hold it to its limits."""
        packet = op.overloadpacket.__name__
        if packet in machine().lacking:
            raise RuntimeError(f"{packet}: its kernel is not in libopapi.so, or libopapi.so not found")
        name = packet if op.namespace == "npu" else f"{op.namespace}::{packet}"
        for npu in cls._entered:
            npu.calls[name] += 1
        if cls._entered and cls._entered[-1].contract:
            check(op, args, kwargs)


class _NameOfTheChip:
    """``torch.npu.get_device_name`` of the machine in force: torch_npu asks CANN once for the whole process."""

    def put(self) -> None:
        import torch

        npu = torch.npu  # type: ignore[attr-defined]
        self._own = npu.get_device_name
        npu.get_device_name = lambda *_: machine().soc

    def take_away(self) -> None:
        import torch

        torch.npu.get_device_name = self._own  # type: ignore[attr-defined]


_name_of_the_chip = _NameOfTheChip()


def _wait_for_autograd() -> None:
    """Wait until autograd's thread for the device has freed what the last backward held.

    Kernels in Python make it hold objects of Python, which it frees after ``backward`` has returned. A thread that asks
    for the GIL while the interpreter ends is ended by pthread_exit, which aborts the process in a destructor of C++.
    The thread frees the gradient of another backward after all that came before, so only the last few instructions of
    that are left to a pause.
    """
    import torch

    freed = threading.Event()
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device="npu", requires_grad=True)
        view = x.view(1)  # torch_npu's own, without Python
        (gradient,) = torch.autograd.grad(view, x, torch.ones(1, device="npu"))
    weakref.finalize(gradient, freed.set)
    del gradient
    freed.wait(timeout=10)
    time.sleep(0.02)
