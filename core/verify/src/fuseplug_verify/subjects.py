"""What is verified: a method of a module, or a function that a method looks up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .data import Example, Refusal
from .rebind import RebindError, calls, lookup, space_of
from .safe_access import all_below, attributes_of, class_name
from .verification.memory import dense
from .verification.twin import twin
from .watch import ById


@dataclass(frozen=True)
class Subject:
    """What is replaced at a site, ready to be run on examples.

    Attributes:
        original: The function behind the module's method, or the function that the method calls.
        module: For a method, the module whose twins are run; ``None`` for a function.
        alike: The module's signature: what is true of this subject is true of any other with the same.
        space: For a function, the globals in which the method looks it up.
        draws: Whether it may draw random numbers. Each run then draws the same ones as any other, and the process's
            generators are put back; if not, they are left alone.
        lazy: The class of lazy tensors that may stand for its results, as `Candidate.lazy`.
    """

    original: Callable[..., Any]
    module: nn.Module | None
    alike: int | None = None
    space: ById | None = None
    draws: bool = True
    lazy: type[Any] | None = None

    @classmethod
    def of_method(cls, module: nn.Module, method: Callable[..., Any], alike: int | None = None) -> Subject | Refusal:
        """*method*, a function of the class of *module*; or why no kernel can read that module.

        Args:
            module: Whose copies are run.
            method: The function that the class has.
            alike: As in `Subject`.
        """
        return _odd_tensor(module) or cls(method, module, alike)

    @classmethod
    def of_function(cls, method: Callable[..., Any], name: str) -> Subject | Refusal:
        """The function that *method* looks up as the global *name*; or why it cannot be replaced there."""
        try:
            if not calls(method, name):
                return Refusal(f"{method.__qualname__} does not call {name}", kind="unsupported")
            return cls(lookup(method, name), None, space=ById(space_of(method, name)))
        except RebindError as error:
            return Refusal(str(error), kind="unsupported")

    def twin(self, example: Example) -> nn.Module:
        """A copy of the module with the values of *example*, on the CPU.

        Raises:
            TypeError: If the subject is a function.
        """
        if self.module is None:
            raise TypeError("a function has no twin: expected the subject of a method")
        return twin(self.module, example)


def _odd_tensor(module: nn.Module) -> Refusal | None:
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
