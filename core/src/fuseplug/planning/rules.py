"""Which kernels take part in a plan, and in which order they are preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .. import torch_private
from ..contract import Mode
from ..discovery.records import KernelRecord
from ..errors import DiscoveryError
from ..hookspecs import BaseKernel
from .measurer import Measurer


@dataclass(frozen=True)
class Rules:
    """How winners are decided.

    Attributes:
        records: The kernels taking part.
        order: Ids or ops in the order the caller prefers them.
        mode: What the model is for.
        check: Whether kernels are run on their device before they are chosen; ``"always"`` to run them even if a
            result was kept from another process.
        installed: Every kernel there is, for the report.
        allow: What the caller has agreed to give up, as `Consent.word`.
        every_size: Whether kernels compute calls of every size, including those too small to gain.
        measurer: Measures from which size on kernels gain; ``None``: kernels are not measured.
        exact: Whether kernels must equal the originals bit for bit.
        excluded: The names of the records that the caller left out.
    """

    records: Sequence[KernelRecord]
    order: Sequence[str]
    mode: Mode
    check: bool | Literal["always"]
    installed: Sequence[KernelRecord]
    allow: Sequence[str] = ()
    every_size: bool = False
    measurer: Measurer | None = None
    exact: bool = False
    excluded: Sequence[str] = ()

    @property
    def gradients(self) -> bool:
        """Whether kernels are to compute calls with gradients."""
        return self.mode == "training"

    @property
    def loses_gradients_when_traced(self) -> bool:
        """Whether kernels may lose their gradients where ``torch.compile`` traces them."""
        return self.gradients and torch_private.MISCOMPILES_FUNCTIONS

    def rank(self, record: KernelRecord, device_type: str) -> tuple[int, bool, int, str]:
        """Sort key: the caller's order, then kernels that name this device type, then priority, then id."""
        kernel = kernel_of(record)
        named = [i for i, word in enumerate(self.order) if word in (record.kernel_id, record.name, kernel.op)]
        return (
            min(named, default=len(self.order)),
            device_type not in kernel.device_types,
            -kernel.priority,
            record.name,
        )

    def taking_part(self, device_type: str) -> list[KernelRecord]:
        """The records of the kernels that run on *device_type*."""
        return [record for record in self.records if record.kernel and record.kernel.runs_on(device_type)]


def kernel_of(record: KernelRecord) -> BaseKernel:
    """The kernel of *record*.

    Raises:
        DiscoveryError: If *record* has no kernel.
    """
    if record.kernel is None:
        raise DiscoveryError(f"kernel {record.name} is {record.condition}: {record.reason}", record=record)
    return record.kernel
