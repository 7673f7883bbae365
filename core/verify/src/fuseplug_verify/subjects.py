"""What a function looks up, and what a module holds, as far as it decides whether that can be verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .data import Refusal
from .rebind import RebindError, calls, lookup, space_of
from .safe_access import all_below, attributes_of, class_name
from .verification.memory import dense
from .verification.outcome import Subject
from .watch import ById


def called_function(method: Callable[..., Any], name: str) -> Subject | Refusal:
    """The function that *method* looks up as the global *name*, ready to be run; or why it cannot be replaced there."""
    try:
        if not calls(method, name):
            return Refusal(f"{method.__qualname__} does not call {name}", kind="unsupported")
        return Subject(lookup(method, name), None, space=ById(space_of(method, name)))
    except RebindError as error:
        return Refusal(str(error), kind="unsupported")


def odd_tensor(module: nn.Module) -> Refusal | None:
    """Why no kernel can read *module*, if one of its tensors, or one below it, is not dense."""
    for each in all_below(module):
        for name, tensor in _own_tensors(each).items():
            if not dense(tensor):
                holder = "its" if each is module else f"the {class_name(each)} below it: its"
                return Refusal(
                    f"{holder} {name} is {_layout(tensor)}, and kernels read dense tensors: make it dense, or leave "
                    "the module as it is",
                    kind="unsupported",
                )
    return None


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and plain tensor attributes (where FSDP keeps its views) of *module* itself, by name."""
    held = attributes_of(module)
    attributes = {name: value for name, value in held.items() if issubclass(type(value), Tensor)}
    registered = {**held["_parameters"], **held["_buffers"]}
    return {**{name: value for name, value in registered.items() if value is not None}, **attributes}


def _layout(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    return f"quantised to {tensor.dtype}" if tensor.is_quantized else "wrapped by torch.func"
