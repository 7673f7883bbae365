"""Modules whose parameters are parts of a flat one, as ``torch.distributed.fsdp.FullyShardedDataParallel`` makes them.

What such a module holds between calls is an empty or partial view, which differs by rank, or a view of freed memory.
It must not be read.
"""

from __future__ import annotations

import sys
from collections.abc import Set as AbstractSet

from torch import nn

from ..patching.slots import attributes_of

WHY = (
    "its parameters are FSDP's flat ones, of which each rank has a part: apply before wrapping in FSDP (what was fused "
    "before it stays fused), or use fully_shard, which keeps parameters apart"
)


def flattened(module: nn.Module) -> AbstractSet[int]:
    """The ids of the modules whose parameters *module* has flattened; empty if it is no such unit, or has none."""
    # Nobody has wrapped anything in a class that nobody has imported.
    unit = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if unit is None or not issubclass(type(module), unit):
        return frozenset()
    if (handle := attributes_of(module).get("_handle")) is None:
        return frozenset()
    holders = getattr(getattr(handle, "flat_param", None), "_modules", None)
    return {id(holder) for holder in (module.modules() if holders is None else holders)}
