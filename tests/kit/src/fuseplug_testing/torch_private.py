"""The private names of torch that the kit needs, each because torch documents nothing that says or does the same.

All are in torch 2.7, the oldest that the metadata admit. Importing this imports torch, but neither Dynamo nor Inductor.
"""

from __future__ import annotations

import torch
from torch._tensor_str import get_printoptions
from torch.nn.modules import module as _nn_module
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DYNAMO_SETTINGS",
    "GLOBAL_HOOKS",
    "INDUCTOR_SETTINGS",
    "MISCOMPILES_FUNCTIONS",
    "get_printoptions",
    "import_dynamo",
    "len_torch_function_stack",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

# Imported above: torch.get_printoptions, which is not there beside torch.set_printoptions; and pytree, with which torch
# itself walks through arguments and results.

len_torch_function_stack = torch._C._len_torch_function_stack
"""How many modes see each function: ``with torch.device("meta"):`` enters one."""

DYNAMO_SETTINGS, INDUCTOR_SETTINGS = "torch._dynamo.config", "torch._inductor.config"
"""The modules with the settings of torch's compilers, to be looked up where somebody has imported them.
`torch.compiler.config` has few of them."""

MISCOMPILES_FUNCTIONS = torch.__version__.startswith("2.11.")
"""Whether this torch compiles an `autograd.Function` without its gradient, silently, if its forward returns a tensor
that it has written to: https://github.com/pytorch/pytorch/issues/180642. Plans leave such calls to the originals."""

GLOBAL_HOOKS = (
    _nn_module._global_forward_hooks,
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_backward_hooks,
    _nn_module._global_backward_pre_hooks,
)
"""The dicts that ``torch.nn.modules.module.register_module_…_hook`` add to: those functions add, and nothing lists."""


def import_dynamo() -> None:
    """Import Dynamo, which `torch.compile` does when it is first called. It wraps `torch.manual_seed` as it comes."""
    import torch._dynamo  # noqa: F401 - to have it imported
