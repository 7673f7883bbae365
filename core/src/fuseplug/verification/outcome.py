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


@dataclass(frozen=True)
class Outcome:
    """Everything one run produced, by name: outputs, gradients (``None`` where there is none), inputs afterwards.

    The tensors themselves, where they are: if a later run writes into them, that shows.
    """

    values: dict[str, Tensor | None]

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
    """
    device = torch.device(device)

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        cast = dtype if dtype is not None and value.is_floating_point() else value.dtype
        moved = value.detach().to(device, cast, copy=True)
        return moved.requires_grad_(gradients and moved.is_floating_point())

    leaves = pytree.tree_map(place, tuple(example.args))
    # A clone of each leaf is handed over, so that code which writes into its input runs, and is seen to do so.
    args = pytree.tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, leaves)
    named = {f"args[{i}]": value for i, value in enumerate(pytree.tree_leaves(leaves)) if isinstance(value, Tensor)}
    call = args
    double = None
    if subject.module is not None:
        double = _place_twin(
            twin(subject.module, example.parameters, example.children, example.attributes), device, dtype, gradients
        )
        if training is not None:
            double.train(training)
        named |= dict(double.named_parameters())
        call = (double, *args)
    seed(device.type)
    outputs = [value for value in pytree.tree_leaves(function(*call)) if isinstance(value, Tensor)]
    values: dict[str, Tensor | None] = {f"output[{i}]": value for i, value in enumerate(outputs)}
    if gradients:
        values |= _gradients(outputs, {k: v for k, v in named.items() if v.requires_grad})
    after = (value for value in pytree.tree_leaves(args) if isinstance(value, Tensor))
    values |= {f"args[{i}] afterwards": value for i, value in enumerate(after)}
    if double is not None:
        own = (*double.named_parameters(), *double.named_buffers())
        values |= {f"{name} afterwards": value for name, value in own if not value.is_meta}
    return Outcome({name: value if value is None else value.detach() for name, value in values.items()})


def difference(ours: Outcome, theirs: Outcome) -> str:
    """The first thing in which two outcomes are not equal bit for bit; ``""`` if they are."""

    def bits(name: str, found: Tensor, expected: Tensor) -> str:
        if _same(found, expected):
            return ""
        gap = (found.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max()
        return f"{name} differs by up to {gap:.3g}"

    return _first(ours, theirs, bits)


def excess(
    ours: Outcome, theirs: Outcome, truth: Outcome, roundings: float, working: float, *, by_row: bool = True
) -> str:
    """Where *ours* is further from the *truth* than the tolerance allows; ``""`` if nowhere.

    The tolerance, for each row of each tensor, is max(2 × the error of *theirs*, (roundings × eps(dtype) + working ×
    eps(float32)) × the largest true magnitude in the row). A right implementation that rounds differently passes; a
    wrong one is off by far more. Not *by_row*, the whole tensor is one row: where results are sums of parts, the parts
    of a row may all but cancel, and what is left says nothing of how exactly they can be added.
    """
    true = truth.on_cpu()

    def error(name: str, found: Tensor, expected: Tensor) -> str:
        return _worst(name, found, expected, true[name], _share(found.dtype, roundings, working), by_row=by_row)

    return _first(ours, theirs, _judging_results(error))


def departure(theirs: Outcome, ours: Outcome, truth: Outcome, roundings: float, working: float) -> str:
    """Where the original, *theirs*, is further from the *truth* than the tolerance allows; ``""`` if nowhere.

    For an original that nobody can equal bit for bit. The tolerance is that of `excess`, not by row, without its first
    term: it is the original itself that is judged here. Its eps is that of the coarsest dtype that takes part, in which
    a float32 result of a mixture was computed. *ours*, the reference in the original's dtypes, must be alike in kind:
    shapes, dtypes, which gradients there are, what is left in the inputs.
    """
    true = truth.on_cpu()
    floating = [value.dtype for value in theirs.values.values() if value is not None and value.is_floating_point()]
    share = max((_share(dtype, roundings, working) for dtype in floating), default=0.0)

    def error(name: str, _: Tensor, expected: Tensor) -> str:
        return _worst(name, expected, None, true[name], share, by_row=False)

    return _first(ours, theirs, _judging_results(error))


Judge = Callable[[str, Tensor, Tensor], str]


def _first(ours: Outcome, theirs: Outcome, judge: Judge) -> str:
    """The first difference in kind, or in what *judge* finds in two tensors alike in kind; ``""`` if there is none."""
    if ours.values.keys() != theirs.values.keys():
        return f"gives {_names(ours)} instead of {_names(theirs)}"
    values = ours.on_cpu()
    for name, expected in theirs.on_cpu().items():
        found = values[name]
        if found is None or expected is None:
            if found is not expected:
                return f"{name} is {_shape(found)} instead of {_shape(expected)}"
        elif (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return f"{name} is {_shape(found)} instead of {_shape(expected)}"
        elif why := judge(name, found, expected):
            return why
    return ""


def _judging_results(error: Judge) -> Judge:
    """*error* where there is room for one; inputs afterwards, and integers, must be the same."""

    def judge(name: str, found: Tensor, expected: Tensor) -> str:
        if not name.endswith("afterwards") and found.is_floating_point():
            return error(name, found, expected)
        return "" if _same(found, expected) else f"{name} is not what the original leaves there: it is written into"

    return judge


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def _share(dtype: torch.dtype, roundings: float, working: float) -> float:
    """The part of a row's magnitude that rounding may take away."""
    return roundings * torch.finfo(dtype).eps + working * torch.finfo(torch.float32).eps


def _worst(name: str, found: Tensor, excuse: Tensor | None, true: Tensor | None, share: float, *, by_row: bool) -> str:
    if true is None:
        return f"{name} has no true value"
    if not found.numel():
        return ""
    width = found.shape[-1] if found.dim() and by_row else found.numel()
    error, true = (t.double().reshape(-1, width) for t in (found, true))
    judged = true.isfinite()
    zero = torch.zeros((), dtype=torch.float64)
    allowed = zero
    if excuse is not None:
        expected = excuse.double().reshape(-1, width)
        # Where the original itself overflows its dtype there is nothing to hold a kernel to.
        judged = judged & expected.isfinite()
        allowed = 2 * torch.where(judged, (expected - true).abs(), zero).amax(-1, keepdim=True)
    scale = torch.where(judged, true.abs(), zero).amax(-1, keepdim=True)
    allowed = torch.maximum(allowed, share * scale)
    error = torch.where(judged, (error - true).abs(), zero).nan_to_num(nan=float("inf"))
    over = error - allowed
    at = int(over.argmax())
    if over.flatten()[at] <= 0:
        return ""
    row = at // over.shape[-1]
    magnitude = f"row of magnitude {scale[row, 0]:.3g}"
    return f"{name} is off by {error.flatten()[at]:.3g} where {allowed[row, 0]:.3g} is allowed ({magnitude})"


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


def _gradients(outputs: Sequence[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        return {f"gradient of {name}": None for name in leaves}
    generator = torch.Generator().manual_seed(1)
    # Eighths of integers below 16 are the same number in every dtype, so that the truth gets what the others get.
    upstream = [
        torch.randint(-15, 16, output.shape, generator=generator).div(8).to(output.device, output.dtype)
        for output in differentiable
    ]
    found = torch.autograd.grad(differentiable, list(leaves.values()), upstream, allow_unused=True)
    return {f"gradient of {name}": gradient for name, gradient in zip(leaves, found, strict=True)}


def _names(outcome: Outcome) -> str:
    return f"[{', '.join(outcome.values)}]"


def _shape(value: Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
