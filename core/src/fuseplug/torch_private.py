"""The private names of torch that Fuseplug needs.

Each is here because torch documents nothing that says or does the same. All are in torch 2.7, the oldest release that
the metadata allow. `tests/core/test_torch_private.py` checks that each does what this module says, and ``nox -s
tests-torch-releases`` checks it on other releases.

Importing this module imports torch, but neither Dynamo nor Inductor, whose import takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as _nn_module

__all__ = ["GLOBAL_HOOKS", "MISCOMPILES_FUNCTIONS", "is_transformed", "len_torch_dispatch_stack", "traced_away"]

P = ParamSpec("P")
R = TypeVar("R")

MISCOMPILES_FUNCTIONS = torch.__version__.startswith("2.11.")
"""Whether this torch silently compiles an `autograd.Function` without its gradient if its forward returns a tensor
that it has written to: https://github.com/pytorch/pytorch/issues/180642. Only torch 2.11 does."""

GLOBAL_HOOKS = (
    _nn_module._global_forward_hooks,
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_backward_hooks,
    _nn_module._global_backward_pre_hooks,
)
"""The dicts to which ``torch.nn.modules.module.register_module_…_hook`` add hooks. No public function lists them."""

len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
"""How many modes see each operation, such as a FakeTensorMode or the mode of a tracer."""


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is at work. Nothing public tells."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def traced_away(function: Callable[P, R]) -> Callable[P, R]:
    """Make Dynamo call *function* while it traces, and treat the result as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
