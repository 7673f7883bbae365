"""The kinds of kernels that are surveyed, and how they run on a machine without their device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from fuseplug import KernelManager


def _compiled(_: KernelManager) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


def _on_a_stand_in(_: KernelManager) -> AbstractContextManager[object]:
    from fuseplug_host_npu import HostNPU

    return HostNPU()


def _interpreted(_: KernelManager) -> AbstractContextManager[object]:
    from fuseplug_testing.triton import rounding_to_nearest

    return rounding_to_nearest()


def _interpreted_liger(manager: KernelManager) -> AbstractContextManager[object]:
    from benchmarks.gpu.interpreting import let_peers_in

    let_peers_in()
    return _interpreted(manager)


@dataclass(frozen=True)
class KernelKind:
    """One kind of kernels.

    Attributes:
        kernels: The prefix of their ids; ``""`` for all kernels, of which those that run on the device take part.
        device: The device of the models.
        description: The kernels and how they are run, in words.
        ready: Returns a context in which this process can run the kernels of a manager.
    """

    kernels: str
    device: str
    description: str
    ready: Callable[[KernelManager], AbstractContextManager[object]]

    def manager(self) -> KernelManager:
        """A manager with these kernels."""
        everybody = KernelManager(environ={})
        if not self.kernels:
            return everybody
        chosen = [record.kernel_id for record in everybody.kernels() if record.kernel_id.startswith(self.kernels)]
        return KernelManager(environ={"FUSEPLUG_KERNELS": ",".join(chosen)})


COMPILED = "inductor"
KERNEL_KINDS = {
    COMPILED: KernelKind("", "cpu", "Inductor's, on the CPU, all compiled", _compiled),
    "npu": KernelKind("npu_", "npu", "those for Ascend NPUs, on the stand-in in host memory", _on_a_stand_in),
    "triton": KernelKind("triton_", "cpu", "Triton's in its interpreter", _interpreted),
    "liger": KernelKind("liger_", "cpu", "Liger-Kernel's in Triton's interpreter", _interpreted_liger),
}
