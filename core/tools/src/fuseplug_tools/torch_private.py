"""The one private name of torch that these tools need, because torch documents nothing equivalent.

It exists in torch 2.7, the oldest version that the package metadata allow. Importing this module imports no torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["default_store"]


def default_store() -> Any:
    """The store through which the ranks of the default process group met. A new one would need its own address."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
