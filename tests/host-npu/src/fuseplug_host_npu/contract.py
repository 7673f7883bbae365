"""A mode that holds every call to the documented limits, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .limits import check
from .torch_private import TorchDispatchMode


class Contract(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, a call that breaks a documented limit raises `ContractError`, on any device.

    `HostNPU` and `FakeNPU` have it built in. By itself it is for a real NPU, and for tensors on ``meta``.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check, and pass the call on."""
        del types
        check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
