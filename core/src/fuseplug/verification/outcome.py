"""Run a callable on an example, keep everything that comes out of it, and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..words import Example
from .neutral import seed
from .twin import mapped, twin


@dataclass(frozen=True)
class Subject:
    """What is replaced at a site, ready to be run on examples.

    Attributes:
        original: The function behind the module's method, or the function that the method calls.
        module: For a method, the module whose twins are run; ``None`` for a function.
        alike: The module's signature: what is true of this subject is true of any other with the same.
    """

    original: Callable[..., Any]
    module: nn.Module | None
    alike: int | None = None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _every(_name: str) -> bool:
    return True


@dataclass(frozen=True)
class Handing:
    """How tensors are handed over: what callers differ in and no result may depend on.

    Attributes:
        arguments: Lays an argument out anew; differentiable, and never the tensor itself: code which writes into its
            input shall run, and be seen to do so.
        upstream: Lays out the gradient that comes from above.
        wants: Whether the gradient of a floating-point argument (``"args[0]"``) or parameter (its name) is wanted.
    """

    arguments: Callable[[Tensor], Tensor] = Tensor.clone
    upstream: Callable[[Tensor], Tensor] = _as_it_is
    wants: Callable[[str], bool] = _every


AS_USUAL = Handing()


@dataclass(frozen=True)
class Outcome:
    """Everything one run produced, by name: outputs, gradients (``None`` where there is none), inputs afterwards.

    The tensors themselves, where they are: if a later run writes into them, that shows.

    Attributes:
        values: The tensors.
        structure: What the tensors came in: nothing, a list, a tuple with a ``None``, …
    """

    values: dict[str, Tensor | None]
    structure: str = ""

    def on_cpu(self) -> dict[str, Tensor | None]:
        """Copies to compare."""
        return {name: value if value is None else value.cpu() for name, value in self.values.items()}


def run(
    subject: Subject,
    function: Callable[..., Any],
    example: Example,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    gradients: bool = True,
    training: bool | None = None,
    handing: Handing = AS_USUAL,
) -> Outcome:
    """Call *function* in the place of the subject's original.

    Args:
        subject: What *function* stands in for.
        function: The original itself, the reference or a kernel, each with the target's signature.
        example: Inputs and parameters; copied, never changed.
        device: Where to run.
        dtype: If given, every floating-point tensor is cast to it first.
        gradients: Whether to run backward, with a fixed random gradient for each differentiable output.
        training: If given, the training flag that the twin runs with.
        handing: How arguments and gradients lie in memory, and which gradients are wanted.
    """
    device = torch.device(device)

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to(device, cast, copy=True)

    leaves = pytree.tree_map(place, tuple(example.args))
    named = {f"args[{i}]": value for i, value in enumerate(pytree.tree_leaves(leaves)) if isinstance(value, Tensor)}
    for name, leaf in named.items():
        leaf.requires_grad_(gradients and leaf.is_floating_point() and handing.wants(name))
    args = pytree.tree_map(lambda value: handing.arguments(value) if isinstance(value, Tensor) else value, leaves)
    call = args
    double = None
    if subject.module is not None:
        double = _place_twin(twin(subject.module, example.parameters, example.children), device, dtype, gradients)
        if training is not None:
            double.train(training)
        for name, parameter in double.named_parameters():
            named[name] = parameter.requires_grad_(parameter.requires_grad and handing.wants(name))
        call = (double, *args)
    seed(device.type)
    result = function(*call)
    outputs = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
    values: dict[str, Tensor | None] = {f"output[{i}]": value for i, value in enumerate(outputs)}
    if gradients:
        values |= _gradients(outputs, {k: v for k, v in named.items() if v.requires_grad}, handing.upstream)
    after = (value for value in pytree.tree_leaves(args) if isinstance(value, Tensor))
    values |= {f"args[{i}] afterwards": value for i, value in enumerate(after)}
    if double is not None:
        own = (*double.named_parameters(), *double.named_buffers())
        values |= {f"{name} afterwards": value for name, value in own if not value.is_meta}
    structure = str(pytree.tree_map(_Kind, result))
    return Outcome({name: value if value is None else value.detach() for name, value in values.items()}, structure)


def difference(ours: Outcome, theirs: Outcome) -> str:
    """The first thing in which two outcomes are not equal bit for bit; ``""`` if they are."""
    if unlike := _unlike(ours, theirs):
        return unlike
    values = ours.on_cpu()
    for name, expected in theirs.on_cpu().items():
        found = values[name]
        if found is None or expected is None:
            if found is not expected:
                return f"{name} is {_shape(found)} instead of {_shape(expected)}"
        elif (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return f"{name} is {_shape(found)} instead of {_shape(expected)}"
        elif not _same(found, expected):
            gap = (found.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max()
            return f"{name} differs by up to {gap:.3g}"
    return ""


def excess(
    ours: Outcome,
    theirs: Outcome,
    truth: Outcome,
    roundings: float,
    working: float,
    coarsest: torch.dtype | None = None,
) -> str:
    """Where *ours* is further from the *truth* than the tolerance allows; ``""`` if nowhere.

    The tolerance, for each row of each tensor, is max(2 × the error of *theirs*, (roundings × eps(dtype) + working ×
    eps(float32)) × the largest true magnitude in the row). A right implementation that rounds differently passes; a
    wrong one is off by far more. *coarsest* takes the place of the tensor's dtype where autocast made what is computed
    on the way coarser than the result.
    """
    if unlike := _unlike(ours, theirs):
        return unlike
    values, true_values = ours.on_cpu(), truth.on_cpu()
    for name, expected in theirs.on_cpu().items():
        found, true = values[name], true_values[name]
        if found is None or expected is None or true is None:
            if found is not expected:
                return f"{name} is {_shape(found)} instead of {_shape(expected)}"
            continue
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return f"{name} is {_shape(found)} instead of {_shape(expected)}"
        if name.endswith("afterwards") or not found.is_floating_point():
            if not _same(found, expected):
                return f"{name} is not what the original leaves there: it is written into"
            continue
        share = roundings * torch.finfo(coarsest or found.dtype).eps + working * torch.finfo(torch.float32).eps
        if worst := _worst(found, expected, true, share):
            return f"{name} is off by {worst}"
    return ""


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def _worst(found: Tensor, expected: Tensor, true: Tensor, share: float) -> str:
    if not found.numel():
        return ""
    rows = [t.double().reshape(-1, t.shape[-1] if t.dim() else 1) for t in (found, expected, true)]
    found, expected, true = rows
    # Where the original itself overflows its dtype there is nothing to hold a kernel to.
    judged = true.isfinite() & expected.isfinite()
    zero = torch.zeros((), dtype=torch.float64)
    scale = torch.where(judged, true.abs(), zero).amax(-1, keepdim=True)
    original = torch.where(judged, (expected - true).abs(), zero).amax(-1, keepdim=True)
    allowed = torch.maximum(2 * original, share * scale)
    error = torch.where(judged, (found - true).abs(), zero).nan_to_num(nan=float("inf"))
    over = error - allowed
    at = int(over.argmax())
    if over.flatten()[at] <= 0:
        return ""
    row = at // over.shape[-1]
    return f"{error.flatten()[at]:.3g} where {allowed[row, 0]:.3g} is allowed (row of magnitude {scale[row, 0]:.3g})"


def _place_twin(double: nn.Module, device: torch.device, dtype: torch.dtype | None, gradients: bool) -> nn.Module:
    def place(value: Tensor) -> Tensor:
        if value.is_meta:
            return value
        cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
        moved = value.detach().to(device, cast, copy=True)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(moved, requires_grad=gradients and moved.is_floating_point())
        return moved

    for module in double.modules():
        for name, value in list(module.__dict__.items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                module.__dict__[name] = mapped(value, place)
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            registry.update((name, place(value)) for name, value in registry.items() if value is not None)
    return double


def _gradients(
    outputs: Sequence[Tensor], leaves: dict[str, Tensor], lay_out: Callable[[Tensor], Tensor]
) -> dict[str, Tensor | None]:
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        return {f"gradient of {name}": None for name in leaves}
    generator = torch.Generator().manual_seed(1)
    # Eighths of integers below 16 are the same number in every dtype, so that the truth gets what the others get.
    upstream = [
        lay_out(torch.randint(-15, 16, output.shape, generator=generator).div(8).to(output.device, output.dtype))
        for output in differentiable
    ]
    found = torch.autograd.grad(differentiable, list(leaves.values()), upstream, allow_unused=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(leaves, found, strict=True)}


class _Kind:
    """Stands for a leaf of the outputs: by value if it is ``None`` or a number, else by what it is."""

    def __init__(self, value: object) -> None:
        plain = value is None or isinstance(value, int | float)
        self._name = "Tensor" if isinstance(value, Tensor) else repr(value) if plain else type(value).__name__

    def __repr__(self) -> str:
        return self._name


def _unlike(ours: Outcome, theirs: Outcome) -> str:
    if ours.values.keys() != theirs.values.keys():
        return f"gives {_names(ours)} instead of {_names(theirs)}"
    if ours.structure != theirs.structure:
        return f"returns {ours.structure:.200} instead of {theirs.structure:.200}"
    return ""


def _names(outcome: Outcome) -> str:
    return f"[{', '.join(outcome.values)}]"


def _shape(value: Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
