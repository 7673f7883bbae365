"""What is known of one kernel: where it comes from, and whether it can be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..hookspecs import BaseKernel

State = Literal["ready", "off", "not allowed", "not installed", "missing", "broken", "conflict"]


@dataclass(frozen=True)
class KernelRecord:
    """One kernel that is installed, registered, or named in the user's settings, and its state.

    Attributes:
        kernel_id: The kernel's id: the name of its entry point.
        distribution: The distribution that has it; ``"(registered)"`` for a kernel registered in this process.
        version: The distribution's version, if it has one.
        value: What the entry point names.
        state: ``"ready"``; ``"off"`` (by ``FUSEPLUG_KERNELS``); ``"not allowed"`` (by ``FUSEPLUG_ALLOW``);
            ``"not installed"`` (the extra that it needs); ``"missing"`` (a requirement of the distribution itself, or
            the kernel that ``FUSEPLUG_KERNELS`` names); ``"broken"`` (it could not be loaded); ``"conflict"`` (another
            distribution claims its id, and has it, or nobody has it).
        reason: Why it is not ready, and what to do; ``""`` if it is.
        requires: What has to be installed on the other machine, if the kernel is ready only there.
        kernel: The kernel, if it was loaded.
        traceback: Python's traceback, if the kernel could not be loaded.
        import_costs: What its import costs everybody, also in ``fuseplug list``: a heavy library, or time.
    """

    kernel_id: str
    distribution: str
    version: str = ""
    value: str = ""
    state: State = "ready"
    reason: str = ""
    requires: str = ""
    kernel: BaseKernel | None = None
    traceback: str = ""
    import_costs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name that is unique even if two distributions claim one id."""
        return f"{self.distribution}:{self.kernel_id}"

    @property
    def condition(self) -> str:
        """The state, in words that can follow "it is"."""
        return "in conflict" if self.state == "conflict" else self.state

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data, as ``fuseplug list --json`` prints it."""
        kernel = self.kernel
        return {
            "id": self.kernel_id,
            "distribution": self.distribution,
            "version": self.version,
            "entry_point": self.value,
            "state": self.state,
            "reason": self.reason,
            "api": kernel.api if kernel else None,
            "op": kernel.op if kernel else None,
            "device_types": list(kernel.device_types) if kernel else None,
            "differentiable": kernel.differentiable if kernel else None,
            "priority": kernel.priority if kernel else None,
            "traceback": self.traceback,
            "import_costs": list(self.import_costs),
        }
