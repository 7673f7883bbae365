"""An NPU in host memory: the real torch_npu, with CPU kernels in the place of the device's kernels."""

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
    """A context in which the CPU computes ops on tensors of device ``npu``, in the memory of these tensors.

    It replaces only the lowest layer, the kernels of the ops. Everything above is torch_npu's own: schemas, autograd
    formulas, autocast, what ``torch.compile`` traces, `torch.npu`. So the context holds for the whole process, every
    thread included. Nothing of it is left once the last instance is exited.

    An op of torch_npu for which there is no reference raises `NotImplementedError`; `fuseplug_host_npu.reference`
    adds one. If torch_npu has no kernel for an op of torch, torch handles the op, as on an NPU.

    Args:
        contract: Whether calls that break a limit raise `ContractError`. The instance entered last decides.
        **the_machine: The fields of `fuseplug_host_npu.Machine`: ``soc``, ``vector_cores``, ``lacking``.

    Attributes:
        machine: The machine to stand in for. The instance entered last decides.
        calls: How often each op has run since the instance was entered: ``calls["npu_rms_norm"]``,
            ``calls["aten::mm"]``.

    Raises:
        HostNPUUnavailable: At construction, if this machine cannot run the stand-in.
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
        """Count a call in every entered instance, and check it against the limits of its op."""
        packet = op.overloadpacket.__name__
        if packet in machine().lacking:
            raise RuntimeError(f"{packet}: its kernel is not in libopapi.so, or libopapi.so not found")
        name = packet if op.namespace == "npu" else f"{op.namespace}::{packet}"
        for npu in cls._entered:
            npu.calls[name] += 1
        if cls._entered and cls._entered[-1].contract:
            check(op, args, kwargs)


class _NameOfTheChip:
    """Makes ``torch.npu.get_device_name`` name the chip of the machine in force: torch_npu asks CANN only once."""

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
    """Wait until autograd's thread for the device has freed the objects that the last backward held.

    Kernels in Python make the thread hold Python objects, which it frees after ``backward`` has returned. If a thread
    asks for the GIL while the interpreter ends, pthread_exit ends that thread, and this aborts the process inside a C++
    destructor. The thread frees the gradient of another backward after everything earlier, so the pause needs to cover
    only the last few instructions.
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
