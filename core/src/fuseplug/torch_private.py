"""The private names of torch that Fuseplug needs.

Each is here because torch documents nothing that says or does the same. All are in torch 2.7, the oldest that the
metadata admit; `tests/core/test_torch_private.py` asks each whether it does what is said here, and ``nox -s
tests-torch-releases`` asks it on other releases.

Importing this imports torch, but neither Dynamo nor Inductor, which take a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.nn.modules import module as _nn_module

__all__ = ["GLOBAL_HOOKS", "MISCOMPILES_FUNCTIONS", "traced_away"]

P = ParamSpec("P")
R = TypeVar("R")

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


def traced_away(function: Callable[P, R]) -> Callable[P, R]:
    """Have Dynamo call *function* while it traces, and take what it returns for a constant.

    As `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
