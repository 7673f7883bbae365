"""RMSNorm on this machine: a fused module against the eager one, torch's own function, and torch.compile of the module.

Every contender does the same work on the same inputs and is first checked for being right; they are timed by turns, so
that a busy moment meets them all. The fused module is what ``manager.apply_all`` makes of it, its guard included.

    python tests/benchmarks/rmsnorm.py [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from record import Table, write
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fuseplug import manager
from fuseplug_rmsnorm.reference import rms_norm as reference
from fuseplug_tools.bench import by_turns, spread

HIDDEN = 2048
ROWS = (1, 16, 128, 2048)
EAGER = "eager module"

Contender = Callable[[Tensor], Tensor]
Work = Callable[..., tuple[Tensor, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    tables = [measure(dtype, work, options.repeats) for dtype in (torch.bfloat16, torch.float32) for work in WORKS]
    write("rmsnorm", tables)


def measure(dtype: torch.dtype, work: Work, repeats: int) -> Table:
    """The microseconds of every contender at every number of rows."""
    name = f"RMSNorm, hidden {HIDDEN}, {str(dtype).removeprefix('torch.')}, {work.__name__.replace('_', ' ')}, in µs"
    table = Table(name, ("rows", "contender", "µs", "× eager, turn by turn"))
    for rows in ROWS:
        contenders, weight = make_contenders(dtype)
        x = torch.randn(rows, HIDDEN).to(dtype).requires_grad_(work is forward_and_backward)
        arguments = (x, weight, torch.randn(rows, HIDDEN).to(dtype))
        assert_right(contenders, work, *arguments)
        samples = by_turns({n: partial(work, f, *arguments) for n, f in contenders.items()}, repeats)
        for contender, microseconds in samples.items():
            ratios = [e / m for e, m in zip(samples[EAGER], microseconds, strict=True)]
            table.add(rows, contender, spread(microseconds), statistics.median(ratios))
    return table


def make_contenders(dtype: torch.dtype) -> tuple[dict[str, Contender], nn.Parameter]:
    """By name; all use the weight that comes with them."""
    eager, fused, compiled = (LlamaRMSNorm(HIDDEN).to(dtype) for _ in range(3))
    fused.weight = compiled.weight = weight = eager.weight
    assert manager.apply_all(fused).report.fused, "nothing was fused"
    torch.compiler.reset()
    contenders = {
        "fuseplug": fused,
        EAGER: eager,
        "F.rms_norm": lambda x: functional.rms_norm(x, (HIDDEN,), weight, 1e-6),
        "torch.compile": torch.compile(compiled),
    }
    return contenders, weight


def forward(function: Contender, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (function(x),)


def forward_and_backward(function: Contender, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    out = function(x)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), grad))


WORKS = (forward, forward_and_backward)


def assert_right(functions: dict[str, Contender], work: Work, x: Tensor, weight: Tensor, grad: Tensor) -> None:
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = work(lambda x: reference(x, wide[1], 1e-6), *wide, grad.double())
    for name, function in functions.items():
        for found, exact in zip(work(function, x, weight, grad), truth, strict=True):
            error = (found.double() - exact).abs().amax() / exact.abs().amax()
            limit = 32 * torch.finfo(x.dtype).eps
            assert error <= limit, f"{name} is {error:.1e} off, allowed {limit:.1e}"


if __name__ == "__main__":
    main()
