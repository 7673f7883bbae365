"""Finds what would be replaced at a site: a plain method, or a function that a method looks up."""

from __future__ import annotations

import types

from torch import nn

from fuseplug_verify import Refusal, Subject

from ..contract import Rejection, Target
from .candidates import rejection_of
from .hooked import describe
from .slots import class_method, is_original, our_replacements


def subject_of(module: nn.Module, alike: int, target: Target) -> Subject | Rejection:
    """What would be replaced in *module*, ready to be run; or why it cannot be replaced.

    Args:
        module: The module itself.
        alike: The module's signature, as in `Subject.alike`.
        target: A method of the module, or a function that one of its methods calls.
    """
    method = own_method(module, target.method)
    if isinstance(method, Rejection):
        return method
    if target.function is None:
        subject = Subject.of_method(module, method, alike)
    else:
        subject = Subject.of_function(method, target.function)
    return rejection_of(subject) if isinstance(subject, Refusal) else subject


def own_method(module: nn.Module, name: str) -> types.FunctionType | Rejection:
    """The method *name* of the class of *module*; or why nothing can be put in its place or around it."""
    method = class_method(module, name)
    if method is None:
        return Rejection(f"{type(module).__name__}.{name} is not a plain method, so it cannot be replaced")
    if is_original(module, name) or our_replacements(module, name):
        return method
    return Rejection(
        f"its {name} was replaced on this instance by {describe(module, name)}: call apply_all before "
        "that is put on, or take it off first",
        kind="foreign",
    )
