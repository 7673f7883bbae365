"""Mamba-2's chunk scan on this machine, forward alone and with a backward: the kernel against transformers' function.

Both are first checked for being right, and then timed by turns, so that a busy moment meets both. It writes nothing.

A step of decoding is timed in a module that is fused and in one that is not, so that the guard takes its time, too.

    python tests/benchmarks/ssd.py [--tokens 512 2048] [--heads 64] [--groups 8] [--steps 8x24] [--repeats N]
        [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from record import Table
from rich.console import Console
from selective_scan import forward, forward_and_backward, steps
from torch import Tensor, nn
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update

from fuseplug_ssd import ssd
from fuseplug_tools.bench import by_turns, spread

WIDTH, STATES, CHUNK = 64, 128, 256
"""Those of Mamba-2's published models."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[16, 512, 2048, 4096])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument(
        "--steps", nargs="*", default=["1x24", "1x64", "1x128", "8x24", "32x24"], help="sequences x heads"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    table = Table(
        f"{options.heads} heads of {WIDTH} × {STATES} states in {options.groups} group(s), {options.dtype}, in ms",
        ("tokens", "kernel", "forward", "and backward"),
    )
    for tokens in options.tokens:
        arguments = make_arguments(tokens, options.heads, options.groups, getattr(torch, options.dtype))
        assert_right(arguments)
        times = [
            by_turns({f.__name__: partial(work, f, arguments) for f in (kernel, transformers)}, options.repeats)
            for work in (forward, forward_and_backward)
        ]
        for name in times[0]:
            table.add(tokens, name, *(spread([us / 1000 for us in microseconds[name]]) for microseconds in times))
    Console(width=150).print(table.show())
    title = f"a step of heads of {WIDTH} × {STATES} states in {options.groups} group(s), {options.dtype}, in µs"
    make = partial(make_step, options.groups)
    steps(Table(title, ("sequences x heads", "module", "step")), options, "inductor_fused_ssd", Decoding, make)


class Decoding(nn.Module):
    """What a mixer makes of one token; it looks up a chunk scan as well, as mixers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj = nn.Linear(2, 2, dtype=dtype)

    def forward(self, state: Tensor, *more: Any) -> Any:
        x, dt, A, B, C, D, dt_bias = more
        return mamba2_selective_state_update(state, x, dt, A, B, C, D, z=None, dt_bias=dt_bias, dt_softplus=True)

    def scan(self, *arguments: Any) -> Any:
        return mamba2_chunk_scan(*arguments)


def make_step(groups: int, batch: int, heads: int, dtype: torch.dtype) -> list[Tensor]:
    """One token of each sequence, as a mixer of transformers gives it: what is one number for a head is expanded."""
    x, dt, A, B, C, D, dt_bias = (tensor.detach() for tensor in make_arguments(1, heads, groups, dtype))
    x, dt, B, C = (tensor[:, 0].expand(batch, *tensor.shape[2:]).contiguous() for tensor in (x, dt, B, C))
    dt, D, dt_bias = (tensor.unsqueeze(-1).expand(*tensor.shape, WIDTH) for tensor in (dt, D, dt_bias))
    A = A.view(heads, 1, 1).expand(heads, WIDTH, STATES)
    return [torch.randn(batch, heads, WIDTH, STATES), x, dt, A, B, C, D, dt_bias]


def make_arguments(tokens: int, heads: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """One sequence, as a mixer of transformers gives it."""
    torch.manual_seed(0)
    x = torch.randn(1, tokens, heads, WIDTH).to(dtype)
    dt, A = torch.randn(1, tokens, heads).to(dtype), -torch.arange(1.0, heads + 1)
    B, C = (torch.randn(1, tokens, groups, STATES).to(dtype) for _ in range(2))
    arguments = [x, dt, A, B, C, torch.ones(heads, dtype=dtype), torch.full((heads,), -4.0, dtype=dtype)]
    return [tensor.requires_grad_() for tensor in arguments]


def kernel(*arguments: Any) -> Tensor:
    return ssd(*arguments, dt_softplus=True)[0]


def transformers(*arguments: Any) -> Tensor:
    x, dt, A, B, C, D, dt_bias = arguments
    result: Tensor = mamba2_chunk_scan(x, dt, A, B, C, CHUNK, D=D, dt_bias=dt_bias, dt_softplus=True)
    return result


def assert_right(arguments: list[Tensor]) -> None:
    eps = torch.finfo(arguments[0].dtype).eps
    pairs = zip(*(forward_and_backward(f, arguments) for f in (kernel, transformers)), strict=True)
    for number, (result, expected) in enumerate(pairs):
        error = (result.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert error <= 64 * eps, f"{number}: {error:.1e}"


if __name__ == "__main__":
    main()
