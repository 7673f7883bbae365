"""A mixture of experts on this machine: fused experts against those of transformers, each way it has to compute them.

Every contender does the same work on the same inputs and is first checked for being right; they are timed by turns, so
that a busy moment meets them all. The fused module is what ``manager.apply_all`` makes of it, its guard included.

    python tests/benchmarks/moe.py [--repeats N] [--large] [--dtype float32]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from record import BOTH, Table, dtypes, write
from torch import Tensor, nn
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from fuseplug import manager
from fuseplug_moe.reference import moe as reference
from fuseplug_tools.bench import by_turns, spread

Contender = Callable[..., Tensor]
Work = Callable[..., tuple[Tensor, ...]]
USUAL = "grouped_mm"
"""What transformers takes if nothing else is asked for."""


class Size(NamedTuple):
    """Of a mixture of experts, and the numbers of tokens it is timed with."""

    experts: int
    k: int
    hidden: int
    inner: int
    tokens: tuple[int, ...]


SIZES = (Size(8, 2, 512, 1024, (1, 16, 128, 512, 2048)), Size(64, 8, 256, 512, (1, 16, 128, 512, 2048)))
LARGE = (Size(128, 8, 2048, 768, (1, 16)),)
BATCHED, BATCHED_UP_TO = "batched_mm", 16
"""Tokens: it copies a matrix for each of their experts."""

SECONDS = 2.0
"""For so long turns go on in each cell."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="turns at the most")
    parser.add_argument("--large", action="store_true", help="also an experts module of 2.4 GB in float32")
    parser.add_argument("--dtype", choices=BOTH, action="append", help="by default those that the CPU computes in")
    options = parser.parse_args()
    for dtype in options.dtype or dtypes():
        tables = [
            measure(size, getattr(torch, dtype), work, options.repeats)
            for size in (*SIZES, *(LARGE if options.large else ()))
            for work in WORKS
        ]
        write(f"moe-{dtype}", tables)


def measure(size: Size, dtype: torch.dtype, work: Work, repeats: int) -> Table:
    """The microseconds of every contender at every number of tokens."""
    name = (
        f"{size.experts} experts, {size.k} for each token, hidden {size.hidden}, inner {size.inner}, "
        f"{str(dtype).removeprefix('torch.')}, {work.__name__.replace('_', ' ')}, in µs"
    )
    table = Table(name, ("tokens", "contender", "µs", f"× {USUAL}, turn by turn"))
    every, weights = make_contenders(size, dtype)
    for tokens in size.tokens:
        contenders = {n: f for n, f in every.items() if n != BATCHED or tokens <= BATCHED_UP_TO}
        torch.manual_seed(0)
        trains = work is forward_and_backward
        arguments = (
            torch.randn(tokens, size.hidden).to(dtype).requires_grad_(trains),
            torch.rand(tokens, size.experts).topk(size.k)[1],
            torch.rand(tokens, size.k).requires_grad_(trains),
            *weights,
            torch.randn(tokens, size.hidden).to(dtype),
        )
        assert_right(contenders, work, arguments)
        runs = {n: partial(work, f, *arguments) for n, f in contenders.items()}
        samples = by_turns(runs, repeats, warm_up=1, within=SECONDS)
        for contender, microseconds in samples.items():
            ratios = [e / m for e, m in zip(samples[USUAL], microseconds, strict=True)]
            table.add(tokens, contender, spread(microseconds), statistics.median(ratios))
    return table


def make_contenders(size: Size, dtype: torch.dtype) -> tuple[dict[str, Contender], tuple[nn.Parameter, ...]]:
    """By name; all use the weights that come with them."""
    config = MixtralConfig(num_local_experts=size.experts, hidden_size=size.hidden, intermediate_size=size.inner)
    config._experts_implementation = USUAL
    usual = MixtralExperts(config).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in usual.parameters():
            weight.normal_(0, weight.shape[-1] ** -0.5)
    made: dict[str, MixtralExperts] = {"fuseplug": with_config(usual, USUAL), USUAL: usual}
    for name in ("eager", BATCHED):
        made[name] = with_config(usual, name)
    assert manager.apply_all(made["fuseplug"]).report.fused, "nothing was fused"
    torch.compiler.reset()
    contenders: dict[str, Contender] = dict(made)
    contenders["torch.compile"] = torch.compile(with_config(usual, USUAL))
    return contenders, (usual.gate_up_proj, usual.down_proj)


def with_config(experts: MixtralExperts, implementation: str) -> MixtralExperts:
    """The same experts, computed another way."""
    other = copy.copy(experts)
    other._parameters = dict(experts._parameters)
    other.config = copy.deepcopy(experts.config)
    other.config._experts_implementation = implementation
    return other


def forward(function: Contender, x: Tensor, index: Tensor, routing: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (function(x, index, routing),)


def forward_and_backward(
    function: Contender, x: Tensor, index: Tensor, routing: Tensor, gate_up: Tensor, down: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    leaves = (x, routing, gate_up, down)
    for leaf in leaves:
        leaf.grad = None
    out = function(x, index, routing)
    out.backward(grad)
    return (out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None))


WORKS = (forward, forward_and_backward)


def assert_right(functions: dict[str, Contender], work: Work, arguments: Sequence[Tensor]) -> None:
    wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in arguments]
    truth = work(lambda x, index, routing: reference(x, index, routing, wide[3], wide[4]), *wide)
    for name, function in functions.items():
        for found, exact in zip(work(function, *arguments), truth, strict=True):
            error = (found.double() - exact).abs().amax() / exact.abs().amax()
            limit = 32 * torch.finfo(arguments[0].dtype).eps
            assert error <= limit, f"{name} is {error:.1e} off, allowed {limit:.1e}"


if __name__ == "__main__":
    main()
