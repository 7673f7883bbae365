"""Finds what would be replaced at a site: a plain method, or a function that a method looks up."""

from __future__ import annotations

import types

import torch
from torch import nn

from fuseplug_verify.rebind import RebindError, calls, lookup, space_of
from fuseplug_verify.safe_access import all_below, class_name
from fuseplug_verify.verification import Subject, dense, own_tensors
from fuseplug_verify.watch import ById

from ..contract import Rejection, Target
from .hooked import describe
from .slots import class_method, is_original, our_replacements


def subject_of(module: nn.Module, alike: int, target: Target) -> Subject | Rejection:
    """What would be replaced in *module*, ready to be run; or why it cannot be replaced.

    Args:
        module: The module itself.
        alike: Its signature, as `Subject.alike`.
        target: A method of it, or a function that one of its methods calls.
    """
    method = own_method(module, target.method)
    if isinstance(method, Rejection):
        return method
    if target.function is None:
        return _odd_tensor(module) or Subject(method, module, alike)
    try:
        if not calls(method, target.function):
            return Rejection(f"{method.__qualname__} does not call {target.function}")
        return Subject(lookup(method, target.function), None, space=ById(space_of(method, target.function)))
    except RebindError as error:
        return Rejection(str(error))


def own_method(module: nn.Module, name: str) -> types.FunctionType | Rejection:
    """The method *name* of the class of *module*; or why nothing can be put in its place, or around it."""
    method = class_method(module, name)
    if method is None:
        return Rejection(f"{class_name(module)}.{name} is not a plain method, so it cannot be replaced")
    if is_original(module, name) or our_replacements(module, name):
        return method
    return Rejection(
        f"its {name} was replaced on this instance by {describe(module, name)}: apply before that is put on, or take "
        "it off first",
        kind="foreign",
    )


def _odd_tensor(module: nn.Module) -> Rejection | None:
    """Why no kernel can read *module*, if one of its tensors, or one below it, is not dense."""
    for each in all_below(module):
        for name, tensor in own_tensors(each).items():
            if not dense(tensor):
                holder = "its" if each is module else f"the {class_name(each)} below it: its"
                return Rejection(
                    f"{holder} {name} is {_layout(tensor)}, and kernels read dense tensors: make it dense, or leave "
                    "the module as it is"
                )
    return None


def _layout(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    return f"quantised to {tensor.dtype}" if tensor.is_quantized else "wrapped by torch.func"
