"""A specimen called as a whole, with the arguments that it names itself: unfused, and fused as a manager fuses it."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug.discovery.ownership import REGISTERED
from fuseplug.discovery.records import KernelRecord
from fuseplug.kernel_manager import KernelManager
from fuseplug.patching import Patch, put_on
from fuseplug.patching.counting import Calls, tried
from fuseplug_verify import Outcome, neutral

from .attempts import foreign
from .subjects import Examined, Specimen
from .torch_private import tree_leaves, tree_map

Inputs = dict[str, Any]
Prepare = Callable[[nn.Module], Callable[..., Any]]
"""Returns the function to call in the place of a module."""


def inputs_of(specimen: Specimen) -> Inputs | None:
    """The arguments of the specimen's own call, by name: its ``dummy_inputs``, as models of transformers have them.

    ``None`` if the specimen does not say how it is called.
    """
    given = getattr(specimen.module, "dummy_inputs", None)
    return dict(given) if isinstance(given, Mapping) and given else None


def manager_of(examined: Examined) -> KernelManager:
    """A manager with the examined kernel alone."""
    record = KernelRecord(examined.name, REGISTERED, kernel=examined.sound)
    return KernelManager({}, find=lambda *_: [record])


def options_for(specimen: Specimen) -> dict[str, Any]:
    """The options for the manager: the user agrees to everything, and the kit itself checks the numbers."""
    examined = specimen.examined
    # The device is named, because a module without parameters does not say where it is.
    options = {"mode": examined.mode, "verify": False, "device": examined.device, "allow": specimen.consents}
    return {**options, "every_size": True}  # specimens are small


def placed(inputs: Inputs, module: nn.Module) -> Inputs:
    """*inputs* on the device of *module*; floating-point tensors also have its dtype, and require gradients."""
    main = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(()))

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        floating = value.is_floating_point()
        moved = value.detach().to(main.device, main.dtype if floating else value.dtype, copy=True)
        return moved.requires_grad_(floating)

    return {name: tree_map(place, value) for name, value in inputs.items()}


class Whole:
    """A specimen with its own call.

    Args:
        specimen: The specimen to call.
        inputs: The arguments of the call.
        method: The method to call.
    """

    def __init__(self, specimen: Specimen, inputs: Inputs, method: str = "forward") -> None:
        self._specimen = specimen
        self._inputs = inputs
        self._method = method
        self.calls: Sequence[Calls] = ()

    @functools.cached_property
    def patches(self) -> Sequence[Patch]:
        """The patches that the manager would put on the specimen."""
        module = copy.deepcopy(self._specimen.module).to(self._specimen.examined.device)
        return manager_of(self._specimen.examined).plan(module, **options_for(self._specimen)).patches

    def run(
        self,
        patches: Sequence[Patch] = (),
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        training: bool | None = None,
        prepare: Prepare | None = None,
    ) -> Outcome:
        """Run one forward and backward of a copy.

        Args:
            patches: The patches to put on the copy first. `calls` then says who computed the call.
            dtype: The dtype to which the copy is cast; ``None`` for its own.
            device: Where the copy runs; where the kernel runs if ``None``.
            training: The training flag; ``None`` for the copy's own.
            prepare: Returns the function to call in the place of the copy.
        """
        examined = self._specimen.examined
        module = foreign(copy.deepcopy)(self._specimen.module)
        foreign(module.to)(device or examined.device, dtype)
        foreign(module.train)(module.training if training is None else training)
        on = [replace(each, module_ref=weakref.ref(module.get_submodule(each.path))) for each in patches]
        put_on(on)
        call = (prepare or self._own)(module)
        inputs = placed(self._inputs, module)
        with neutral(examined.device_type, dtype=None, random_kept=True):
            torch.manual_seed(0)
            done = tried(on, lambda: call(**inputs))
        self.calls = done
        return _outcome(done.result, module, inputs, gradients=examined.sound.differentiable)

    def _own(self, module: nn.Module) -> Callable[..., Any]:
        return self.method_of(module)

    def method_of(self, module: nn.Module) -> Callable[..., Any]:
        """The function of *module* that is called."""
        return foreign(module if self._method == "forward" else getattr(module, self._method))


def _outcome(result: Any, module: nn.Module, inputs: Inputs, *, gradients: bool) -> Outcome:
    result = tree_map(_real, result)
    outputs = _tensors(result)
    values: dict[str, Tensor | None] = {f"output[{number}]": value for number, value in enumerate(outputs)}
    given = {
        f"{name}[{number}]" if isinstance(value, list | tuple) else name: leaf
        for name, value in inputs.items()
        for number, leaf in enumerate(_tensors(value))
    }
    if gradients:
        leaves = {name: each for name, each in (*module.named_parameters(), *given.items()) if each.requires_grad}
        values |= _gradients([each for each in outputs if each.requires_grad], leaves)
    values |= {f"{name} afterwards": value for name, value in given.items()}
    structure = str(tree_map(lambda value: type(value).__name__ if isinstance(value, Tensor) else repr(value), result))
    return Outcome({name: each if each is None else each.detach() for name, each in values.items()}, structure)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _real(value: Any) -> Any:
    """The plain tensor that *value* stands for, if it is lazy."""
    return foreign(value.computed)().as_subclass(Tensor) if hasattr(type(value), "computed") else value


def _gradients(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    if not (outputs and leaves):
        return {f"gradient of {name}": None for name in leaves}
    generator = torch.Generator().manual_seed(1)
    # Eighths of small integers are exact in every dtype.
    upstream = [
        torch.randint(1, 16, each.shape, generator=generator, device="cpu").div(8).to(each.device, each.dtype)
        for each in outputs
    ]
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(leaves, found, strict=True)}
