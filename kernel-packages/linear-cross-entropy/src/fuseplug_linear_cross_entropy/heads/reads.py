"""Tells by the names in the code of a head's function whether it depends on its arguments alone."""

from __future__ import annotations

import types
from typing import Any

import torch

from fuseplug.reading import names

_COMPUTE = """
add_ addmm addmm_ amax arange bfloat16 cast cdiv clamp contiguous copy_ device div_ dtype element_ty empty exp float
float16 float32 full gather get_autocast_dtype inf int64 is_autocast_enabled load log mark_non_differentiable
masked_fill math max maximum min mm mul_ needs_input_grad pow program_id range save_for_backward saved_tensors
set_materialize_grads shape sigmoid squeeze store stride sum t tanh tanh_ tl to torch triton type unsqueeze upper
where zeros zeros_like zip
"""
"""Names in torch, Python and Triton that only compute, or say how a backward is recorded."""

_OF_CONTEXT = "chunk_size compute_dtype final_logit_softcapping kernel_args logit_scale"
"""Attributes in which the forward keeps values for the backward."""

_GATHERS = "maybe_gather_lm_head_ctx trainer.utils"
"""Names that gather a weight that DeepSpeed has split. No kernel is given such a weight."""

_KNOWN = frozenset(f"{_COMPUTE} {_OF_CONTEXT} {_GATHERS}".split())
_CONSTANTS = (bool, int, float, str, tuple, type(None))


def unread(function: type[torch.autograd.Function]) -> str:
    """The first name in the code of *function* that may stand for more than computing; ``""`` if there is none.

    The code may use the names above, Triton's, and constants and functions of its own module, whose code is read, too.
    """
    for half in _halves(function):
        for name in names(half):
            if name not in _KNOWN and not _is_own(half, name):
                return name
    return ""


def watched(function: type[torch.autograd.Function]) -> list[tuple[dict[str, Any], str, Any]]:
    """The globals that *function* now depends on: each as the dictionary that holds it, its name, and its value."""
    spaces = [(half.__globals__, name) for half in _halves(function) for name in names(half)]
    return [(space, name, space[name]) for space, name in spaces if name in space]


def _halves(function: Any) -> tuple[types.FunctionType, types.FunctionType]:
    return function.forward, function.backward


def _is_own(half: types.FunctionType, name: str) -> bool:
    value = half.__globals__.get(name)
    own = isinstance(value, types.FunctionType) and value.__globals__ is half.__globals__
    return own or (name in half.__globals__ and isinstance(value, _CONSTANTS)) or _is_triton(value)


def _is_triton(value: Any) -> bool:
    """Whether *value* is a program for GPUs. No kernel is offered on a device that runs such programs."""
    return type(value).__module__.partition(".")[0] == "triton"
