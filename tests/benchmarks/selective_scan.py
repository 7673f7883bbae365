"""The selective scan on this machine, without gradients and with a backward: the kernel against transformers' function.

Both are first checked for being right, and then timed by turns, so that a busy moment meets both. It writes nothing.

A step of decoding is timed in a module that is fused and in one that is not, so that the guard takes its time, too.

    python tests/benchmarks/selective_scan.py [--tokens 128 512] [--steps 4x8192] [--repeats N] [--warm-up N]
        [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from record import Table
from rich.console import Console
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update

from fuseplug import manager
from fuseplug_selective_scan import selective_scan
from fuseplug_tools.bench import by_turns, spread

CHANNELS, STATES = 256, 16
NAMES = ("x", "dt", "A", "B", "C", "D", "z", "delta_bias")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 32, 128, 512, 1024, 2048])
    parser.add_argument(
        "--steps", nargs="*", default=["1x8192", "4x4096", "16x1536", "4x8192", "64x1536"], help="sequences x channels"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    table = Table(
        f"{CHANNELS} channels of {STATES} states, {options.dtype}, in ms",
        ("tokens", "kernel", "forward", "and backward"),
    )
    for tokens in options.tokens:
        arguments = make_arguments(tokens, getattr(torch, options.dtype))
        assert_right(arguments)
        times = [
            by_turns(
                {f.__name__: partial(work, f, arguments) for f in (kernel, transformers)},
                options.repeats,
                warm_up=options.warm_up,
            )
            for work in (forward, forward_and_backward)
        ]
        for name in times[0]:
            table.add(tokens, name, *(spread([us / 1000 for us in microseconds[name]]) for microseconds in times))
    Console(width=150).print(table.show())
    table = Table(f"a step of {STATES} states, {options.dtype}, in µs", ("sequences x channels", "module", "step"))
    steps(table, options, "inductor_fused_selective_scan", Decoding, make_step)


def steps(
    table: Table,
    options: argparse.Namespace,
    kernel_id: str,
    decoding: Callable[[torch.dtype], nn.Module],
    make: Callable[..., list[Tensor]],
) -> None:
    """Print *table* with the times of each of the steps, in a fused module and in one that is not.

    Args:
        table: With a column for the sizes, one for the module, and one for the times.
        options: Those of the command line.
        kernel_id: The kernel that fuses the module.
        decoding: Makes a module for a dtype.
        make: Makes the arguments, the states first, of the sizes of a step and a dtype.
    """
    dtype = getattr(torch, options.dtype)
    modules = {"fused": decoding(dtype), "transformers": decoding(dtype)}
    applied = manager.apply_all(modules["fused"], include=[kernel_id], every_size=True)
    assert len(applied.report.fused) == 2, applied.report
    for step in options.steps:
        arguments = make(*map(int, step.split("x")), dtype)
        with torch.no_grad():
            copies = [[arguments[0].clone(), *arguments[1:]] for _ in modules]
            found, expected = (module(*copy).double() for module, copy in zip(modules.values(), copies, strict=True))
            assert (found - expected).abs().max() <= 64 * torch.finfo(dtype).eps * expected.abs().max()
            contenders = {name: partial(module, *arguments) for name, module in modules.items()}
            times = by_turns(contenders, max(options.repeats, 40), warm_up=options.warm_up, at_a_time=5)
        for name, microseconds in times.items():
            table.add(step, name, spread(microseconds))
    Console(width=150).print(table.show())


class Decoding(nn.Module):
    """What a mixer makes of one token; it looks up a scan as well, as mixers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj = nn.Linear(2, 2, dtype=dtype)

    def forward(
        self, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *more: Any
    ) -> Any:
        z, dt_bias = more
        return mamba_selective_state_update(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=True)

    def scan(self, *arguments: Any) -> Any:
        return mamba_selective_scan(*arguments)


def make_step(batch: int, channels: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    x, dt, z, B, C = (torch.randn(batch, width).to(dtype) for width in (channels, channels, channels, STATES, STATES))
    A, dt_bias = -torch.arange(1.0, STATES + 1).repeat(channels, 1), torch.full((channels,), -4.0)
    return [torch.randn(batch, channels, STATES), x, dt, A, B, C, torch.ones(channels, dtype=dtype), z, dt_bias]


def make_arguments(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """One sequence, as a mixer of transformers gives it: what does not depend on the token is in float32."""
    torch.manual_seed(0)

    def normal(width: int) -> Tensor:
        return torch.randn(1, width, tokens).to(dtype)

    A = -torch.arange(1.0, STATES + 1).repeat(CHANNELS, 1)
    x, dt, z, B, C = normal(CHANNELS), normal(CHANNELS), normal(CHANNELS), normal(STATES), normal(STATES)
    arguments = [x, dt, A, B, C, torch.ones(CHANNELS), z, torch.full((CHANNELS,), -4.0)]
    return [tensor.requires_grad_() for tensor in arguments]


def kernel(*arguments: Any) -> Tensor:
    return selective_scan(*arguments, delta_softplus=True)[0]


def transformers(*arguments: Any) -> Tensor:
    x, dt, A, B, C, D, z, delta_bias = arguments
    return mamba_selective_scan(x, dt, A, B, C, D=D, z=z, delta_bias=delta_bias, delta_softplus=True)


def forward(function: Any, arguments: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [function(*arguments)]


def forward_and_backward(function: Any, arguments: list[Tensor]) -> list[Tensor]:
    y = function(*arguments)
    return [y, *torch.autograd.grad(y.square().mean(), arguments)]


def assert_right(arguments: list[Tensor]) -> None:
    """Compare results, and gradients of the first tokens: those of the original take minutes for many."""
    tokens = min(128, arguments[0].shape[-1])
    few = [t.detach()[..., :tokens].requires_grad_() if t.dim() == 3 else t for t in arguments]
    eps = torch.finfo(arguments[0].dtype).eps
    for name, found, expected in zip(
        ("y", *NAMES), *(forward_and_backward(f, few) for f in (kernel, transformers)), strict=True
    ):
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert error <= 64 * eps, f"{name}: {error:.1e}"


if __name__ == "__main__":
    main()
