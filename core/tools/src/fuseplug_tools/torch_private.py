"""The private names of torch that these tools need, each because torch documents nothing that says or does the same.

All are in torch 2.7, the oldest that the metadata admit. Importing this imports torch, but not Dynamo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["default_store", "get_tracing_state", "tree_leaves", "tree_map"]

# pytree is imported above: torch itself walks through arguments and results with it.

get_tracing_state = torch._C._get_tracing_state
"""The state of `torch.jit.trace`; ``None`` outside of one. `torch.jit.is_tracing` takes almost twice as long."""


def default_store() -> Store:
    """The store with which the ranks of the default process group met. A new one would need an address of its own."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
