"""The private names of torch that Fuseplug needs.

Each is here because torch documents nothing that says or does the same. All are in torch 2.7, the oldest that the
metadata admit; `tests/core/test_torch_private.py` asks each whether it does what is said here, and ``nox -s
tests-torch-releases`` asks it on other releases.

What is asked at each call of a kernel is torch's own C function under a public name: a function around it would take
a third longer, and `torch.compile` knows torch's functions by identity. Importing this imports torch, but neither
Dynamo nor Inductor, which take a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch._tensor_str import get_printoptions
from torch.nn.modules import module as _nn_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DYNAMO_SETTINGS",
    "DYNAMO_WRAPPERS",
    "GLOBAL_HOOKS",
    "INDUCTOR_SETTINGS",
    "JIT_INTERNALS",
    "MISCOMPILES_FUNCTIONS",
    "OpOverload",
    "OpOverloadPacket",
    "disable_current_modes",
    "function_modes_off",
    "get_printoptions",
    "get_tracing_state",
    "import_dynamo",
    "is_functorch_wrapped_tensor",
    "len_torch_function_stack",
    "schemas_of",
    "set_default_device",
    "traced_away",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

P = ParamSpec("P")
R = TypeVar("R")

# Imported above, because nothing public names them: the types of operations (torch.ops has only instances);
# torch.get_printoptions, beside torch.set_printoptions; and pytree, with which torch itself walks through arguments and
# results.

get_tracing_state = torch._C._get_tracing_state
"""The state of `torch.jit.trace`; ``None`` outside of one. `torch.jit.is_tracing` takes almost twice as long."""

is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one that a transform of `torch.func` made around another; its type is Tensor all the same."""

len_torch_function_stack = torch._C._len_torch_function_stack
"""How many modes see each function: ``with torch.device("meta"):`` enters one."""

disable_current_modes = _disable_current_modes
"""Takes the modes that see each operation off inside; the public context managers only enter one."""

DYNAMO_SETTINGS, INDUCTOR_SETTINGS = "torch._dynamo.config", "torch._inductor.config"
"""The modules with the settings of torch's compilers, to be looked up where somebody has imported them.
`torch.compiler.config` has few of them."""

DYNAMO_WRAPPERS = ("torch._dynamo", "torch._compile")
"""The modules in which the decorators of `torch.compiler` are written, and those around torch's own functions."""

MISCOMPILES_FUNCTIONS = torch.__version__.startswith("2.11.")
"""Whether this torch compiles an `autograd.Function` without its gradient, silently, if its forward returns a tensor
that it has written to: https://github.com/pytorch/pytorch/issues/180642. Only torch 2.11 does."""

JIT_INTERNALS = "torch._jit_internal"
"""The module in which functions of `torch.jit` are written."""

GLOBAL_HOOKS = (
    _nn_module._global_forward_hooks,
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_backward_hooks,
    _nn_module._global_backward_pre_hooks,
)
"""The dicts that ``torch.nn.modules.module.register_module_…_hook`` add to: those functions add, and nothing lists."""


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


def set_default_device(device: str) -> None:
    """Make *device* the default; ``"cpu"`` is as if nobody had set one.

    `torch.set_default_device` leaves a mode behind unless it is given ``None``, and then `torch.get_default_device`
    raises in torch 2.7.
    """
    torch.set_default_device(None if device == "cpu" else device)
    if device == "cpu":
        with contextlib.suppress(AttributeError):
            del torch._GLOBAL_DEVICE_CONTEXT.device_context


def import_dynamo() -> None:
    """Import Dynamo, which `torch.compile` does when it is first called. It wraps `torch.manual_seed` as it comes."""
    import torch._dynamo  # noqa: F401 - to have it imported


def traced_away(function: Callable[P, R]) -> Callable[P, R]:
    """Have Dynamo call *function* while it traces, and take what it returns for a constant.

    As `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
