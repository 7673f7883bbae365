"""A gated MLP on this machine, fused, eager and compiled; whole, and what is between its projections alone.

Every contender does the same work on the same inputs and is first checked for being right; they are timed by turns, so
that a busy moment meets them all. The fused module is what ``manager.apply_all`` makes of it, its guard included.

    python tests/benchmarks/swiglu.py [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from record import BOTH, Table, dtypes, write
from torch import Tensor, nn
from torch.nn import functional

from fuseplug import manager
from fuseplug_swiglu import swiglu
from fuseplug_swiglu.reference import swiglu as reference
from fuseplug_swiglu.specimens.mlps import Separate
from fuseplug_tools.bench import by_turns, spread

HIDDEN = 1024
WIDTHS = (3072, 11008)
ROWS = (1, 16, 128, 512)
LARGE = (512, 2048)
"""Rows for the kernel alone: a fused model leaves fewer to torch's own operations."""

EAGER = "eager"

SECONDS = 2.0
"""For so long turns go on in each cell."""

Contender = Callable[..., Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="turns at the most")
    parser.add_argument("--dtype", choices=BOTH, action="append", help="by default those that the CPU computes in")
    options = parser.parse_args()
    torch.manual_seed(0)
    tables = []
    for dtype in [getattr(torch, name) for name in options.dtype or dtypes()]:
        for backward in (False, True):
            tables.append(measure("between the projections", between, LARGE, dtype, backward, options.repeats))
            tables.append(measure(f"the whole MLP, hidden {HIDDEN}", whole, ROWS, dtype, backward, options.repeats))
    write("swiglu", tables)


def measure(
    what: str, make: Callable[..., tuple], counts: Sequence[int], dtype: torch.dtype, backward: bool, repeats: int
) -> Table:
    """The microseconds of every contender at every size."""
    work = "forward and backward" if backward else "forward"
    title = f"SwiGLU, {what}, {str(dtype).removeprefix('torch.')}, {work}, in µs"
    table = Table(title, ("intermediate", "rows", "contender", "µs", "× eager, turn by turn"))
    for inner in WIDTHS:
        contenders, inputs_for, truth = make(inner, dtype)
        for rows in counts:
            inputs = [x.requires_grad_(backward) for x in inputs_for(rows)]
            assert_right(contenders, truth, inputs, backward)
            runs = {n: partial(run, f, inputs, backward) for n, f in contenders.items()}
            samples = by_turns(runs, repeats, warm_up=1, within=SECONDS)
            for contender, microseconds in samples.items():
                ratios = [e / m for e, m in zip(samples[EAGER], microseconds, strict=True)]
                table.add(inner, rows, contender, spread(microseconds), statistics.median(ratios))
    return table


def between(inner: int, dtype: torch.dtype) -> tuple:
    """What is fused, for tensors."""

    def eager(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    def inputs_for(rows: int) -> list[Tensor]:
        return [torch.randn(rows, inner).to(dtype) for _ in range(2)]

    torch.compiler.reset()
    contenders = {"fuseplug": swiglu, EAGER: eager, "torch.compile": torch.compile(lambda gate, up: eager(gate, up))}
    return contenders, inputs_for, reference


def whole(inner: int, dtype: torch.dtype) -> tuple:
    """The module, projections included; all contenders share their weights."""
    eager, fused, compiled = (Separate(nn.SiLU(), HIDDEN, inner).to(dtype) for _ in range(3))
    for module in (fused, compiled):
        module.gate_proj, module.up_proj, module.down_proj = eager.gate_proj, eager.up_proj, eager.down_proj
    assert manager.apply_all(fused, include=["swiglu"]).report.fused, "nothing was fused"
    exact = Separate(nn.SiLU(), HIDDEN, inner).double()
    exact.load_state_dict(eager.state_dict())

    def inputs_for(rows: int) -> list[Tensor]:
        return [torch.randn(rows, HIDDEN).to(dtype)]

    torch.compiler.reset()
    return {"fuseplug": fused, EAGER: eager, "torch.compile": torch.compile(compiled)}, inputs_for, exact


def run(function: Contender, inputs: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    if not backward:
        with torch.no_grad():
            return (function(*inputs),)
    out = function(*inputs)
    leaves = [*inputs, *(p for p in getattr(function, "parameters", tuple)())]
    return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out)))


def assert_right(contenders: dict[str, Contender], truth: Contender, inputs: Sequence[Tensor], backward: bool) -> None:
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = run(truth, wide, backward)
    errors = {}
    for name, function in contenders.items():
        pairs = zip(run(function, inputs, backward), expected, strict=True)
        errors[name] = max(float((found.double() - exact).abs().max() / exact.abs().max()) for found, exact in pairs)
    limit = max(2 * errors[EAGER], 16 * torch.finfo(inputs[0].dtype).eps)
    for name, error in errors.items():
        allowed = limit if name == "fuseplug" else 2 * limit  # a peer is only to be no other function
        assert error <= allowed, f"{name} is {error:.1e} off, allowed {allowed:.1e}"


if __name__ == "__main__":
    main()
