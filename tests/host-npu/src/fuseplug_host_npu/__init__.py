"""An NPU for tests, on any Linux machine: the real torch_npu, with the CPU in the place of the chip.

>>> from fuseplug_host_npu import HostNPU
>>> with HostNPU() as npu:  # doctest: +SKIP
...     x = torch.randn(4, 8, device="npu", requires_grad=True)
...     torch_npu.npu_swiglu(x).sum().backward()
>>> npu.calls["npu_swiglu_backward"]  # doctest: +SKIP
1

Tests can use the fixtures ``host_npu`` and ``fake_npu``. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ContractError, HostNPUUnavailable
from .fake import FakeNPU
from .host import HostNPU
from .limits import limit, require
from .loading import load
from .machine import Machine
from .references import reference

if TYPE_CHECKING:
    from .contract import Contract

__all__ = [
    "Contract",
    "ContractError",
    "FakeNPU",
    "HostNPU",
    "HostNPUUnavailable",
    "Machine",
    "limit",
    "load",
    "reference",
    "require",
]


def __getattr__(name: str) -> Any:
    if name == "Contract":
        from .contract import Contract

        return Contract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
