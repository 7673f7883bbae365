"""Language models in training, with the loss computed from lazy logits or not, to test what is around a kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug.hookspecs import resolve
from fuseplug_linear_cross_entropy.kernels import LinearCrossEntropyKernel

from .managers import manager_of
from .models import tiny_llama


class PlainKernel(LinearCrossEntropyKernel):
    """The reference as a kernel: its results are right, so any error is in what is around it."""

    kernel_id: ClassVar[str] = "plain_linear_cross_entropy"
    function: ClassVar[str] = "fuseplug_linear_cross_entropy.reference:linear_cross_entropy"


def in_question() -> type[LinearCrossEntropyKernel]:
    """`PlainKernel`, or the kernel that ``LOSS_KERNEL`` names as ``package.module:Class``."""
    name = os.environ.get("LOSS_KERNEL")
    return resolve(name) if name else PlainKernel


LOSS, GRADIENT = 1e-5, 1e-4
"""How far a loss and a gradient in float32 may be from the unfused ones, as shares: the order of sums differs."""

Kernel = type[LinearCrossEntropyKernel]


def ids(rows: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    """Tokens for `language_model`."""
    return torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(seed))


def language_model(**changes: Any) -> nn.Module:
    """A small Llama in training mode, always with the same weights."""
    model = tiny_llama(**changes).train()
    # With its own initialisation, every token is as likely as any other, and gradients say little.
    nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


def apply(kernel: Kernel, model: nn.Module, **options: Any) -> Any:
    """Fuse the loss of *model* with *kernel* alone; return what was applied.

    The kernel is not verified first: conformance judges it, which takes seconds.
    """
    return manager_of(kernel).apply_all(model, **{"allow": "lazy_logits", "verify": False, **options})


class Step(NamedTuple):
    """The results of a training step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    output: Any = None


def step(model: nn.Module, **given: Any) -> Step:
    """One forward and backward with labels."""
    model.zero_grad(set_to_none=True)
    tokens = ids()
    output = model(**{"input_ids": tokens, "labels": tokens, **given})
    loss = output[0] if isinstance(output, tuple) else output.loss
    loss.backward()
    return Step(loss.detach().clone(), gradients(model), output)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the gradient of every parameter that has one, by its name in the model without wrappers."""
    return {
        name.replace("module.", ""): each.grad.detach().clone()
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def assert_same(found: Step, true: Step, loss: float = LOSS, gradient: float = GRADIENT) -> None:
    """Assert that losses and gradients are equal except for the order of sums."""
    torch.testing.assert_close(found.loss, true.loss, rtol=loss, atol=0)
    assert found.gradients.keys() == true.gradients.keys()
    for name, value in true.gradients.items():
        allowed = gradient * value.float().abs().max().item() + 1e-8
        torch.testing.assert_close(found.gradients[name], value, rtol=0, atol=allowed, msg=name)


def told(applied: Any) -> tuple[int, dict[str, int], int]:
    """The calls of the head: fused, how many of these were made real by what, and computed by the original."""
    (calls,) = applied.calls()
    return calls.fused, dict(calls.made_real), calls.original


def assert_step(
    kernel: Kernel,
    make: Callable[[], nn.Module],
    run: Callable[[nn.Module], Step] = step,
    calls: tuple[int, dict[str, int], int] = (1, {}, 0),
    **tolerance: float,
) -> None:
    """Assert that ``run(make())`` gives the same fused, *calls* counts the head's calls, and undo takes all off."""
    true = run(make())
    model = make()
    with apply(kernel, model) as applied:
        assert applied.report.fused, applied.report
        assert_same(run(model), true, **tolerance)
        assert told(applied) == calls
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same(run(make()), true, loss=0, gradient=0)
