"""Finds calls of a model that together reach every module in question.

The whole model is called first. If that is not enough, its parts are called by themselves.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .candidates import candidates
from .submodule import Submodule

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call of the module at *path* with *inputs*; ``""`` is the path of the model itself.

    If *loss* is true, only the loss among its results counts.
    """

    path: str
    inputs: Inputs = field(repr=False)
    loss: bool = False

    def __str__(self) -> str:
        return f"{self.path}({', '.join(self.inputs)})"


def calls_for(model: nn.Module, paths: Collection[str]) -> list[Call]:
    """Calls that reach every module at *paths*, as far as such calls are found.

    Raises:
        RuntimeError: If none is found; the message has the error of each try.
    """
    left, said, calls = set(paths), [], []
    tried = set()
    for path in ("", *sorted(paths)):
        for above in _above(path) if path else ("",):
            if above in tried or not any(_inside(each, above) for each in left):
                continue
            tried.add(above)
            for choice in candidates(Submodule(model, above)):
                found = _first_that_runs(model, above, choice, left, said)
                if found is not None and found[1]:
                    calls.append(found[0])
                    left -= found[1]
                if not any(_inside(each, above) for each in left):
                    break
    if not calls:
        raise RuntimeError(" | ".join(said))
    return calls


def _first_that_runs(
    model: nn.Module, path: str, choice: Iterable[Inputs], wanted: Collection[str], said: list[str]
) -> tuple[Call, set[str]] | None:
    """The first call with one of *choice* that runs, and the paths in *wanted* that it reaches.

    The errors of calls that do not run are added to *said*.
    """
    for inputs in choice:
        call = Call(path, inputs)
        try:
            return call, _reached(model, call, wanted)
        except Exception as error:
            said.append(f"{call}: {type(error).__name__}: {str(error)[:160]}")
    return None


def _above(path: str) -> Iterator[str]:
    """The paths of all modules around the one at *path*, outermost first, then *path* itself."""
    return itertools.accumulate(path.split("."), "{}.{}".format)


def _inside(path: str, other: str) -> bool:
    return not other or f"{path}.".startswith(f"{other}.")


def _reached(model: nn.Module, call: Call, paths: Collection[str]) -> set[str]:
    """The *paths* whose modules *call* reaches.

    Raises:
        Exception: Whatever the call raises; a `ValueError` if it gives nothing differentiable.
    """
    found: set[str] = set()
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: found.add(path)) for path in paths
    ]
    try:
        if not outputs(model, call)[0]:
            raise ValueError("nothing differentiable")
    finally:
        for handle in handles:
            handle.remove()
    return found


def called(model: nn.Module, calls: Sequence[Call], paths: Collection[str]) -> set[str]:
    """The *paths* whose modules *calls* reach."""
    return set().union(*(_reached(model, call, paths) for call in calls))


def outputs(model: nn.Module, call: Call) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The differentiable results of *call*, the same each time, and its inputs that may have gradients, by name.

    Inputs of the whole model are left out: what it does with them need not be differentiable.
    """
    torch.manual_seed(0)
    main = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(()))
    asked: dict[str, Tensor] = {}

    def given(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(given(f"{name}[{n}]", each) for n, each in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value.to(main.device, copy=True)
        value = value.to(main.device, main.dtype, copy=True)
        if call.path:
            asked[name] = value.requires_grad_()
            return value.clone()
        return value

    inputs = {name: given(name, value) for name, value in call.inputs.items()}
    result = model.get_submodule(call.path)(**inputs)
    found = _tensors(result) if not call.loss else _tensors({"loss": result["loss"]})
    return {name: value for name, value in found if value.requires_grad}, asked


def step(model: nn.Module, calls: Sequence[Call], autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    """One forward and backward for each of *calls*: all outputs and gradients, by name, on the CPU.

    The gradients are those of parameters and inputs. The forward runs under autocast to the dtype *autocast*, if given.
    """
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    result = {}
    for call in calls:
        prefix = "with labels: " if call.loss else f"{call.path}: " if call.path else ""
        model.zero_grad(set_to_none=True)
        with torch.autocast(kind, autocast) if autocast is not None else contextlib.nullcontext():
            found, asked = outputs(model, call)
        generator = torch.Generator().manual_seed(1)
        upstream = [
            torch.randn(y.shape, generator=generator).to(y.device, y.dtype) / max(1, y.numel()) ** 0.5
            for y in found.values()
        ]
        torch.autograd.backward(list(found.values()), upstream)
        tensors = itertools.chain(model.named_parameters(), asked.items())
        gradients = {name: t.grad for name, t in tensors if t.grad is not None}
        values = {name: y.detach() for name, y in found.items()}
        result |= {prefix + name: value.to("cpu", copy=True) for name, value in (values | gradients).items()}
    model.zero_grad(set_to_none=True)
    return result


def _tensors(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors(each, f"{name}[{number}]")
