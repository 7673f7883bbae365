"""The private names of torch that the kit needs, because torch documents nothing that does the same.

All are in torch 2.7, the oldest that the metadata admit.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["MISCOMPILES_FUNCTIONS", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

# pytree is imported above: torch itself walks through arguments and results with it.

MISCOMPILES_FUNCTIONS = torch.__version__.startswith("2.11.")
"""Whether this torch compiles an `autograd.Function` without its gradient, silently, if its forward returns a tensor
that it has written to: https://github.com/pytorch/pytorch/issues/180642. Only torch 2.11 does."""
