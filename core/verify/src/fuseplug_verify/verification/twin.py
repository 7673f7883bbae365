"""Copies of a module that share its class and code, but nothing that can change: no tensors, objects, hooks, patches.

Fuseplug only ever runs such copies, never the live module. So it does not matter whether the live module is sharded,
offloaded, on meta, hooked or wrapped, and any thread may plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Example, Refusal
from ..safe_access import all_below, attributes_of, children_of, class_name, said_by
from .copying import Copying, UncopyableError
from .memory import readable
from .signature import HOOKS, INSTANCE_ONLY, Signatures

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_MOST_MODULES = 64
"""An attribute may lead to modules that are no children. Up to so many are copied: more are the rest of the model."""


class StandIns:
    """Makes copies whose tensors have a shape and a dtype but no values, one for each module, and says which are alike.

    Stand-ins of modules that are alike share what need not be separate. It serves as long as the modules live and are
    not changed.
    """

    def __init__(self) -> None:
        self._faults: dict[int, Exception] = {}
        self._signatures = Signatures()
        self._attributes: dict[int, dict[str, Any]] = {}
        # Also the memo of what hangs on modules, where what refers to a module finds its stand-in.
        self._made: dict[int, Any] = {}
        self._copying = Copying(_valueless, self.of, self._made)

    def of(self, module: nn.Module) -> nn.Module:
        """The stand-in of *module*, those of all below it included.

        For TorchScript, which cannot be copied so, and for what cannot be looked at an empty module stands in.
        """
        if id(module) not in self._made:
            try:
                self._make(module)
            except Exception as error:  # noqa: BLE001 - a third party's class may raise anything
                self._faults[id(module)] = error
                self._made[id(module)] = nn.Module()
        made: nn.Module = self._made[id(module)]
        return made

    def likeness(self, module: nn.Module) -> int:
        """A number that is equal for two modules only if both compute the same function of inputs and parameters."""
        return self._signatures.of(module)

    def fault(self, module: nn.Module) -> Refusal | None:
        """Why *module*, whose stand-in was made, cannot be looked at or copied; an empty module stands in for it."""
        error = self._signatures.faults.get(id(module)) or self._faults.get(id(module))
        if error is None:
            return None
        if isinstance(error, UncopyableError):
            return Refusal(str(error), kind="unsupported")
        return Refusal(said_by(error), kind="error")

    def _make(self, module: nn.Module) -> None:
        if issubclass(type(module), torch.jit.ScriptModule):
            self._made[id(module)] = nn.Module()
            return
        number = self._signatures.of(module)
        if id(module) in self._signatures.faults:
            self._made[id(module)] = nn.Module()
            return
        # Before its children, one of which may refer to it.
        copy = self._made[id(module)] = object.__new__(type(module))
        if number not in self._attributes:
            self._attributes[number] = _copied(module, self._copying)
        children = {name: None if child is None else self.of(child) for name, child in children_of(module).items()}
        _fill(copy, self._attributes[number] | {"_modules": children})


def twin(module: nn.Module, example: Example, place: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """A runnable copy of *module*, with what *example* has for its tensors, attributes and children.

    Buffers and attributes that it does not name keep their values; parameters that it does not name have none. What
    cannot be copied, an open file say, is an `Uncopied` there.

    Args:
        module: Any module but TorchScript.
        example: What takes the place of its own; copied too.
        place: Copies a tensor to where the twin shall run, parameters as parameters; ``None``: to the CPU.

    Raises:
        Exception: Whatever the module raises when it is looked at.
    """
    return _Twin(place or _cloned).of(module, example)


class _Twin:
    """Copies the modules of one twin."""

    def __init__(self, place: Callable[[Tensor], Tensor]) -> None:
        self._memo: dict[int, Any] = {}
        self._place = place
        self._with_values = Copying(self._value_of, self._outside, self._memo)
        self._without = Copying(_valueless, self._outside, self._memo)

    def of(self, module: nn.Module, example: Example) -> nn.Module:
        # All of them first: what hangs on one may refer to any other.
        given = {name: self._given(child) for name, child in example.children.items()}
        own = children_of(module)
        self._memo |= {id(own[name]): copy for name, copy in given.items() if own.get(name) is not None}
        copy = self._memo[id(module)] = object.__new__(type(module))
        children = {
            name: None if child is None else self._child(child) for name, child in own.items() if name not in given
        }
        held = _copied(module, self._with_values)
        buffers, parameters = attributes_of(module)["_buffers"], held["_parameters"]
        held["_buffers"] |= {name: self._value_of(value) for name, value in buffers.items() if value is not None}
        for name, value in example.parameters.items():
            if name in parameters:
                parameters[name] = self._place(nn.Parameter(value, value.is_floating_point() or value.is_complex()))
            elif name in held["_buffers"]:
                held["_buffers"][name] = self._place(value)
            else:
                held[name] = self._place(value)
        held |= {name: self._with_values.attribute(name, value) for name, value in example.attributes.items()}
        # In the module's own order, which a forward may go by.
        order = {name: given[name] if name in given else children[name] for name in own}
        _fill(copy, held | {"_modules": order | given})
        return copy

    def _child(self, module: nn.Module) -> nn.Module:
        """A copy without values, all below it included."""
        return self._all(module, self._without, _valueless_parameter)

    def _given(self, module: nn.Module) -> nn.Module:
        """A copy with all values."""
        return self._all(module, self._with_values, self._place)

    def _outside(self, module: nn.Module) -> nn.Module:
        """A copy of what an attribute leads to and no registry has, with the values that are small."""
        for number, each in enumerate(all_below(module)):
            if number == _MOST_MODULES or issubclass(type(each), torch.jit.ScriptModule):
                raise UncopyableError(f"it leads to a {class_name(module)} that is no child of the module")
        return self._all(module, self._with_values, self._place)

    def _all(self, module: nn.Module, copying: Copying, parameter: Callable[[Tensor], Tensor]) -> nn.Module:
        if id(module) in self._memo:
            known: nn.Module = self._memo[id(module)]
            return known
        if issubclass(type(module), torch.jit.ScriptModule):
            return nn.Module()
        copy: nn.Module = object.__new__(type(module))
        self._memo[id(module)] = copy
        children = {
            name: None if child is None else self._all(child, copying, parameter)
            for name, child in children_of(module).items()
        }
        held = _copied(module, copying)
        if copying is self._with_values:
            for registry, change in (("_parameters", parameter), ("_buffers", self._value_of)):
                live = attributes_of(module)[registry]
                held[registry] = {name: value if value is None else change(value) for name, value in live.items()}
        _fill(copy, held | {"_modules": children})
        return copy

    def _value_of(self, tensor: Tensor) -> Tensor:
        return self._place(tensor.detach()) if readable(tensor) else _valueless(tensor)


def _cloned(tensor: Tensor) -> Tensor:
    if not readable(tensor):
        return _valueless_parameter(tensor) if isinstance(tensor, nn.Parameter) else _valueless(tensor)
    copy = tensor.detach().cpu().clone()
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _fill(copy: nn.Module, attributes: Mapping[str, Any]) -> None:
    # Neither __init__, which may do anything, nor __setattr__, which does more than set in torch.compile's wrapper.
    object.__setattr__(copy, "__dict__", attributes)


def _copied(module: nn.Module, copying: Copying) -> dict[str, Any]:
    """What *module* holds, its children left out, parameters and buffers without values."""
    attributes: dict[str, Any] = {}
    for name, value in attributes_of(module).items():
        if name in HOOKS:
            if value is not None:
                attributes[name] = {}
        elif name not in INSTANCE_ONLY and name not in _REGISTRIES:
            attributes[name] = copying.attribute(name, value)
    held = attributes_of(module)
    attributes["_parameters"] = {
        name: parameter if parameter is None else _valueless_parameter(parameter)
        for name, parameter in held["_parameters"].items()
    }
    attributes["_buffers"] = {name: b if b is None else _valueless(b) for name, b in held["_buffers"].items()}
    return attributes


def _valueless(tensor: Tensor) -> Tensor:
    try:
        # DeepSpeed's ZeRO-3 leaves an empty tensor behind, with the true shape beside it.
        return torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
    except Exception:  # noqa: BLE001 - a subclass of Tensor may raise anything
        # A nested tensor has no shape; planning leaves alone what has one.
        return torch.empty(0, device="meta")


def _valueless_parameter(parameter: Tensor) -> nn.Parameter:
    valueless = _valueless(parameter)
    return nn.Parameter(valueless, valueless.is_floating_point() or valueless.is_complex())
