"""Fuses a module, then changes it or calls it in ways that nobody planned for, beside a twin that is not fused."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseplug.patching.counting import tried
from support.managers import manager_of

Outcome = list[Any]


def numbers(shape=(2, 5, 16), dtype=torch.float32, scale=1.0, seed=7):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)


@dataclass(frozen=True)
class Met:
    """The outcome of one attack.

    Attributes:
        alone: Why no kernel was applied; ``""`` if one was.
        answers: Who computed each call: ``"kernel"``, ``"original"``, or ``"unseen"`` where no patch counted it.
        reasons: Why the original computed calls.
    """

    alone: str
    answers: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def last(self) -> str:
        return "alone" if self.alone else self.answers[-1]


def fused(module: nn.Module, kernels: Sequence[Any], **options: Any) -> Any:
    """Apply *kernels* to *module*, and no others that happen to be installed."""
    return manager_of(*kernels).apply_all(module, **options)


def outcome(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None, seed: int = 0) -> Outcome:
    """The types of a call's outputs, the outputs and every gradient; or the type of what it raised."""
    torch.manual_seed(seed)
    leaves = [a.detach().requires_grad_() if _differentiable(a) else a for a in args]
    parameters = [p for p in module.parameters() if p.requires_grad]
    try:
        # Not the leaves themselves, so that code may write into its input.
        given = [leaf * 1 if _differentiable(leaf) and torch.is_grad_enabled() else leaf for leaf in leaves]
        result = module(*given, **kwargs or {})
        outputs = [each for each in (result if isinstance(result, tuple | list) else [result]) if each is not None]
        wanted = [leaf for leaf in leaves if _differentiable(leaf)] + parameters
        differentiable = [each for each in outputs if each.requires_grad]
        gradients: Sequence[Any] = []
        if differentiable and torch.is_grad_enabled():
            above = [numbers(each.shape, each.dtype, seed=5) for each in differentiable]
            gradients = torch.autograd.grad(differentiable, wanted, above, allow_unused=True)
        return [*(type(each) for each in outputs), *(each.detach().clone() for each in outputs), *gradients]
    except Exception as error:
        return [type(error)]


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def assert_alike(found: Outcome, expected: Outcome, share: float = 1e-4) -> None:
    assert len(found) == len(expected), f"{found} instead of {expected}"
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor):
            coarse = 2e-2 if other.dtype in (torch.bfloat16, torch.float16) else share
            magnitude = torch.nan_to_num(other, 0, 1, -1).abs().max().item() if other.numel() else 0.0
            torch.testing.assert_close(one, other, rtol=coarse, atol=coarse * max(1.0, magnitude), equal_nan=True)
        else:
            assert one is other, f"{one} instead of {other}"


def attacked(
    kernels: Sequence[Any],
    make: Callable[[], nn.Module],
    *changes: Callable[[nn.Module], Any],
    given: Sequence[Sequence[Any]] | None = None,
    kwargs: dict[str, Any] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    first: Callable[[nn.Module], Any] | None = None,
    compiled: bool = False,
    seeds: Sequence[int] = (0,),
    share: float = 1e-4,
    **options: Any,
) -> Met:
    """Fuse a module, call it and its twin after each change, and assert that all results and gradients are alike.

    Args:
        kernels: The kernels to fuse with.
        make: Makes the module; called twice.
        *changes: The changes to make to each of the two after fusing, one after the other.
        given: The arguments of each call; one call in float32 by default.
        kwargs: Keyword arguments of each call.
        around: Entered around each call.
        first: A change to make to each of the two before fusing.
        compiled: Whether to compile the fused module after all changes, with the backend ``"eager"``.
        seeds: The seeds with which each call is made.
        share: How far numbers in float32 may be off.
        **options: The options of ``apply_all``.
    """
    torch.manual_seed(1)
    module, twin = make(), make()
    twin.load_state_dict(module.state_dict())
    for each in (module, twin):
        if first is not None:
            first(each)
    applied = fused(module, kernels, **options)
    called = module
    if compiled:
        for change in changes:
            change(module)
            change(twin)
        changes = ()
        torch._dynamo.reset()
        called = torch.compile(module, fullgraph=True, backend="eager")
    answers: list[str] = []
    reasons: dict[str, None] = {}
    for change in (None, *changes):
        if change is not None:
            change(module)
            change(twin)
        for args, seed in itertools.product(given or [[numbers()]], seeds):
            with around():
                want = outcome(twin, args, kwargs, seed)
                found, tried = _tried(applied, called, args, kwargs, seed)
            assert_alike(found, want, share)
            answers.append(_answer(tried))
            reasons.update((reason, None) for each in tried if each.original for reason in each.reasons)
    assert all(patch.in_place() or patch in applied.lost for patch in applied.patches)
    return Met(_left_alone(applied), tuple(answers), tuple(reasons))


def _tried(
    applied: Any, called: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, seed: int
) -> tuple[Outcome, Any]:
    """The outcome of a call, and what each patch counted in it."""
    found: Outcome = []

    def run() -> None:
        found.extend(outcome(called, args, kwargs, seed))

    return found, tried(applied.patches, run)


def _answer(tried: Any) -> str:
    if any(each.original for each in tried):
        return "original"
    return "kernel" if any(each.fused for each in tried) else "unseen"


def _left_alone(applied: Any) -> str:
    if applied.report.fused:
        return ""
    return "; ".join(entry.why_not for entry in applied.report.left_alone) or "no row"


def changing(patch: pytest.MonkeyPatch, owner: Any, name: str, value: Any) -> Callable[[nn.Module], None]:
    """A change of something outside the modules, which affects both."""

    def change(_: nn.Module) -> None:
        (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, value)

    return change
