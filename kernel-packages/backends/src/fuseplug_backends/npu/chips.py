"""Ascend chips, and the chips for which each operation of torch_npu is documented."""

from __future__ import annotations

import re

A2, A3, INFERENCE, TRAINING, A5 = "Atlas A2", "Atlas A3", "Atlas inference", "Atlas training", "Ascend 950"

_FAMILIES = {
    r"Ascend910B[1-9]": A2,
    r"Ascend910_93": A3,
    r"Ascend310P": INFERENCE,
    r"Ascend910(A|B|ProA|ProB|PremiumA)?$": TRAINING,
    r"Ascend950": A5,
}
"""Families by patterns of ``torch.npu.get_device_name()``. The name ``Ascend910B`` alone is the first generation."""

DOCUMENTED: dict[str, tuple[str, ...]] = {
    "npu_rms_norm": (A2, A3, INFERENCE, TRAINING),
    "npu_add_rms_norm": (A2, A3, INFERENCE),
    "npu_gemma_rms_norm": (A2, A3),
    "npu_swiglu": (A2, A3, A5),
    "npu_clipped_swiglu": (A2, A3),
    "npu_rotary_mul": (A2, A3, INFERENCE, TRAINING),
    "npu_moe_token_permute": (A2, A3, A5),
    "npu_moe_token_unpermute": (A2, A3, A5),
    "npu_grouped_matmul": (A2, A3, A5, INFERENCE),
}
"""The chips for which each operation is documented, from the product tables in ``docs/zh/custom_APIs/torch_npu`` of
Ascend/op-plugin, as of August 2026."""


def family(name: str) -> str | None:
    """The family of the chip with this name; ``None`` for a new chip."""
    return next((family_name for pattern, family_name in _FAMILIES.items() if re.match(pattern, name)), None)


def undocumented(name: str, ops: tuple[str, ...]) -> list[str]:
    """The *ops* that are documented, but not for the chip with this name."""
    here = family(name)
    return [] if here is None else [op for op in ops if op in DOCUMENTED and here not in DOCUMENTED[op]]
