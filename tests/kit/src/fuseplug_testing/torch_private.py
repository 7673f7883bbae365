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

# Imported above: get_printoptions, which torch does not publish beside torch.set_printoptions; and pytree, with which
# torch itself walks through arguments and results.

len_torch_function_stack = torch._C._len_torch_function_stack
"""The number of modes that see each function: ``with torch.device("meta"):`` enters one."""

DYNAMO_SETTINGS, INDUCTOR_SETTINGS = "torch._dynamo.config", "torch._inductor.config"
"""The modules with the settings of torch's compilers, to look up once something has imported them.
`torch.compiler.config` has only a few of the settings."""

MISCOMPILES_FUNCTIONS = torch.__version__.startswith("2.11.")
"""Whether this torch compiles an `autograd.Function` without its gradient, silently, if its forward returns a tensor
that it has written to: https://github.com/pytorch/pytorch/issues/180642. Plans leave such calls to the originals."""

GLOBAL_HOOKS = (
    _nn_module._global_forward_hooks,
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_backward_hooks,
    _nn_module._global_backward_pre_hooks,
)
"""The dicts to which ``torch.nn.modules.module.register_module_…_hook`` add; torch has no function that lists them."""


def import_dynamo() -> None:
    """Import Dynamo, as the first call of `torch.compile` does. Its import wraps `torch.manual_seed`."""
    import torch._dynamo  # noqa: F401 - for the effects of the import
