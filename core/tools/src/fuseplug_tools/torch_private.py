"""The private name of torch that these tools need, because torch documents nothing that says the same.

It is in torch 2.7, the oldest that the metadata admit. Importing this imports torch, but not Dynamo.
"""

from __future__ import annotations

from typing import Any

__all__ = ["default_store"]


def default_store() -> Any:
    """The store with which the ranks of the default process group met. A new one would need an address of its own."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
