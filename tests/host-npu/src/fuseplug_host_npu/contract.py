"""A mode that checks every call against the documented limits, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .limits import check
from .torch_private import TorchDispatchMode


class Contract(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this mode, a call that breaks a documented limit raises `ContractError`, on any device.

    `HostNPU` and `FakeNPU` check the limits themselves. Use this mode with a real NPU, and for tensors on ``meta``.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check the call, and pass it on."""
        del types
        check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
