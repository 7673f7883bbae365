"""The private names of torch that this library needs: nothing else here has one.

Each is here because torch documents nothing that says or does the same. All are in torch 2.7, the oldest that the
metadata admit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "DYNAMO_WRAPPERS",
    "OpOverload",
    "OpOverloadPacket",
    "disable_current_modes",
    "function_modes_off",
    "is_functorch_wrapped_tensor",
    "len_torch_function_stack",
    "schemas_of",
    "tree_leaves",
    "tree_map",
]

# Imported above, because nothing public names them: the types of operations (torch.ops has only instances), and
# pytree, with which torch itself walks through arguments and results.

is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one that a transform of `torch.func` made around another; its type is Tensor all the same."""

disable_current_modes = _disable_current_modes
"""Takes the modes that see each operation off inside; the public context managers only enter one."""

len_torch_function_stack = torch._C._len_torch_function_stack
"""How many modes see each function: ``with torch.device("meta"):`` enters one."""

DYNAMO_WRAPPERS = ("torch._dynamo", "torch._compile")
"""The modules in which the decorators of `torch.compiler` are written, and those around torch's own functions."""


@contextlib.contextmanager
def function_modes_off() -> Iterator[None]:
    """Inside, no mode sees functions.

    They are taken off the stack. What torch has to switch them off, `torch._C.DisableTorchFunction`, sets a flag that
    Dynamo guards on: a kernel compiled inside would be compiled again at run time.
    """
    modes = []
    while len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def schemas_of(op: OpOverload | OpOverloadPacket) -> list[torch._C.FunctionSchema]:
    """The schemas of *op*, one for each overload. They say which arguments it writes to, and nothing public does."""
    if isinstance(op, OpOverload):
        return [op._schema]
    return list(torch._C._jit_get_schemas_for_operator(op._qualified_op_name))
