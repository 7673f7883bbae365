"""Each kernel by itself, in the calls that a model makes."""

from __future__ import annotations

import statistics
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..patching.replacement import replacement_of
from ..rebind import rebound
from ..torch_private import tree_leaves, tree_map
from .contenders import sharing
from .turns import by_turns, spread
from .work import wait_for

if TYPE_CHECKING:
    from torch import nn

    from ..patching import Applied, Patch

ORIGINAL, KERNEL = "original", "kernel"


@dataclass(frozen=True)
class OpRow:
    """The time of one kernel in one call of the model.

    Attributes:
        kernel_id: The kernel.
        variant: What it computes.
        where: The first module with this replacement, and how many others have it.
        work: ``"forward"``, or ``"forward and backward"``.
        sizes: The shapes of the tensors that it is called with.
        original: Milliseconds of the model's own code, as `spread` gives them.
        kernel: Those of the kernel.
        gain: How many times as fast it is: the median of the ratios, turn by turn.
        declined: Why the kernel leaves such calls to the original; ``""`` if it does not.
    """

    kernel_id: str
    variant: str
    where: str
    work: str
    sizes: str
    original: dict[str, float]
    kernel: dict[str, float]
    gain: float
    declined: str = ""


class _Call(NamedTuple):
    """How a target was called: its arguments, a module first where it is a method."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def measure_ops(model: nn.Module, applied: Applied, run: Callable[[nn.Module], Any], repeats: int) -> list[OpRow]:
    """Time every kernel of *applied* against the code that it replaces, on its own.

    Args:
        model: The unfused model.
        applied: What was applied to a copy of it.
        run: Runs a model: the calls that it makes of its modules are those that are timed. If it records gradients, the
            backward is timed too.
        repeats: Turns that count.

    Returns:
        A row for each different replacement. Those that serve some calls of the whole model only, as that of the loss
        does, have none, because they are nothing by themselves.
    """
    alike: dict[Callable[..., Any], list[Patch]] = {}
    for patch in applied.patches:
        if not patch.target.around:
            alike.setdefault(patch.function, []).append(patch)
    around = {patch.kernel_id for patch in applied.patches if patch.target.around}
    first = {function: patches for function, patches in alike.items() if patches[0].kernel_id not in around}
    calls = _recorded(model, [patches[0] for patches in first.values()], run)
    return [_row(patches, calls[function], repeats) for function, patches in first.items() if function in calls]


def _recorded(
    model: nn.Module, patches: Sequence[Patch], run: Callable[[nn.Module], Any]
) -> dict[Callable[..., Any], _Call]:
    """The first call of the target of each of *patches* while *run* runs, by the function that replaces it."""
    listening = sharing(model)
    calls: dict[Callable[..., Any], _Call] = {}

    def recorder(patch: Patch, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(patch.function, _Call(tree_map(_kept, args), tree_map(_kept, kwargs)))
            return original(*args, **kwargs)

        return record

    for patch in patches:
        target = patch.target
        module = _module(listening, patch)
        method = getattr(type(module), target.method)
        if target.function is None:
            listener = recorder(patch, method)
        else:
            listener = rebound(method, {target.function: recorder(patch, patch.function.__wrapped__)})  # type: ignore[attr-defined]
        setattr(module, target.method, types.MethodType(listener, module))
    run(listening)
    for patch in patches:
        vars(_module(listening, patch)).pop(patch.target.method, None)
    return calls


def _module(model: nn.Module, patch: Patch) -> nn.Module:
    return model.get_submodule(patch.path)


def _kept(value: Any) -> Any:
    """*value* as an argument of a call of its own, from which gradients go no further."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _row(patches: Sequence[Patch], call: _Call, repeats: int) -> OpRow:
    patch = patches[0]
    tensors = [each for each in tree_leaves((call.args, dict(call.kwargs))) if isinstance(each, Tensor)]
    module = call.args[0] if patch.target.function is None else None
    leaves = [each for each in (*tensors, *(() if module is None else module.parameters())) if each.requires_grad]
    backward = any(each.requires_grad for each in tensors)
    functions = {ORIGINAL: patch.function.__wrapped__, KERNEL: patch.function}  # type: ignore[attr-defined]
    runs = {name: partial(_run, function, call, leaves if backward else []) for name, function in functions.items()}
    samples = by_turns(runs, repeats)
    ratios = [theirs / ours for theirs, ours in zip(*(samples[name] for name in (ORIGINAL, KERNEL)), strict=True)]
    original, kernel = (spread([each / 1e3 for each in samples[name]]) for name in (ORIGINAL, KERNEL))
    more = f" and {len(patches) - 1} more" if len(patches) > 1 else ""
    return OpRow(
        patch.kernel_id,
        patch.variant,
        f"{patch.path or 'the model'}{more}",
        "forward and backward" if backward else "forward",
        ", ".join(" × ".join(map(str, each.shape)) for each in tensors),
        original,
        kernel,
        statistics.median(ratios),
        replacement_of(patch.function).why_not(call.args, call.kwargs),
    )


def _run(function: Callable[..., Any], call: _Call, leaves: Sequence[Tensor]) -> None:
    with torch.set_grad_enabled(bool(leaves)):
        results = [each for each in tree_leaves(function(*call.args, **call.kwargs)) if isinstance(each, Tensor)]
        if leaves:
            ends = [each for each in results if each.requires_grad]
            torch.autograd.grad(ends, leaves, [torch.ones_like(each) for each in ends], allow_unused=True)
    wait_for(results[0])
