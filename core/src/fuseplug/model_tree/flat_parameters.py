"""Modules whose parameters are parts of a flat one, made by ``torch.distributed.fsdp.FullyShardedDataParallel``.

Between calls, the parameters of such a module are empty or partial views, which differ by rank, or views of freed
memory. They must not be read.
"""

from __future__ import annotations

import sys
from collections.abc import Set as AbstractSet

from torch import nn

from ..patching.slots import attributes_of

WHY = (
    "FSDP has flattened its parameters, and each rank holds a part: apply before wrapping in FSDP (what was fused "
    "before it stays fused), or use fully_shard, which keeps parameters apart"
)


def flattened(module: nn.Module) -> AbstractSet[int]:
    """The ids of the modules whose parameters *module* has flattened; empty if it is no FSDP unit or has none."""
    # If the class was never imported, nothing is wrapped in it.
    unit = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if unit is None or not issubclass(type(module), unit):
        return frozenset()
    if (handle := attributes_of(module).get("_handle")) is None:
        return frozenset()
    holders = getattr(getattr(handle, "flat_param", None), "_modules", None)
    return {id(holder) for holder in (module.modules() if holders is None else holders)}
