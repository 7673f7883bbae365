"""The machine to stand in for: its chip, its cores, and what its CANN lacks. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import os

SOC_VARIABLE = "FUSEPLUG_HOST_NPU_SOC"
"""The environment variable that names the chip for the whole process, torch_npu included."""


@dataclasses.dataclass(frozen=True, eq=False)
class Machine:
    """The properties of a machine on which limits and references depend, besides the arguments of a call.

    Attributes:
        soc: The chip, by the name that ``torch.npu.get_device_name()`` gives: ``"Ascend910B3"`` is an Atlas A2,
            ``"Ascend950PR_9599"`` an Ascend 950. A2 and A3 refuse the same calls.
        vector_cores: How many vector cores the chip has; an Ascend910B3 has 40.
        lacking: Ops of torch_npu for which the machine's CANN has no kernel: ``{"npu_clipped_swiglu"}``.
    """

    soc: str = dataclasses.field(default_factory=lambda: os.environ.get(SOC_VARIABLE) or "Ascend910B3")
    vector_cores: int = 40
    lacking: frozenset[str] = frozenset()

    @property
    def is_950(self) -> bool:
        """Whether the chip is of the family Ascend 950, for which CANN has other kernels."""
        return self.soc.startswith("Ascend950")


entered: list[Machine] = []
"""The machines of the entered stand-ins; the last one is in force."""


def machine() -> Machine:
    """The machine in force."""
    return entered[-1] if entered else Machine()
