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
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._tensor_str import get_printoptions
from torch.nn.modules import module as _nn_module

__all__ = [
    "DYNAMO_SETTINGS",
    "GLOBAL_HOOKS",
    "INDUCTOR_SETTINGS",
    "MISCOMPILES_FUNCTIONS",
    "get_printoptions",
    "get_tracing_state",
    "import_dynamo",
    "len_torch_function_stack",
    "set_default_device",
    "traced_away",
]

P = ParamSpec("P")
R = TypeVar("R")

# get_printoptions is imported above: torch has `torch.set_printoptions`, and nothing public beside it.

get_tracing_state = torch._C._get_tracing_state
"""The state of `torch.jit.trace`; ``None`` outside of one. `torch.jit.is_tracing` takes almost twice as long."""

len_torch_function_stack = torch._C._len_torch_function_stack
"""How many modes see each function: ``with torch.device("meta"):`` enters one."""

DYNAMO_SETTINGS, INDUCTOR_SETTINGS = "torch._dynamo.config", "torch._inductor.config"
"""The modules with the settings of torch's compilers, to be looked up where somebody has imported them.
`torch.compiler.config` has few of them."""

MISCOMPILES_FUNCTIONS = torch.__version__.startswith("2.11.")
"""Whether this torch compiles an `autograd.Function` without its gradient, silently, if its forward returns a tensor
that it has written to: https://github.com/pytorch/pytorch/issues/180642. Only torch 2.11 does."""

GLOBAL_HOOKS = (
    _nn_module._global_forward_hooks,
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_backward_hooks,
    _nn_module._global_backward_pre_hooks,
)
"""The dicts that ``torch.nn.modules.module.register_module_…_hook`` add to: those functions add, and nothing lists."""


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
