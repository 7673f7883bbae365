"""RoPE on this machine: a fused attention's rotary function against the eager one, and torch.compile of it.

Every contender does the same work on the same inputs and is first checked for being right; they are timed by turns, so
that a busy moment meets them all. The fused one is what ``manager.apply_all`` makes of a module that calls the
function, its guard included.

    python tests/benchmarks/rope.py [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from record import Table, write
from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from fuseplug import manager
from fuseplug_tools.bench import by_turns, spread

LENGTHS = (1, 16, 128, 512, 2048)
LARGE, SMALL = "32 and 8 heads of 128", "8 and 4 heads of 64"
HEADS = {LARGE: (32, 8, 128), SMALL: (8, 4, 64)}
FUNCTIONS = {"halves": modeling_llama.apply_rotary_pos_emb, "pairs": modeling_cohere.apply_rotary_pos_emb}
VARIANTS = (("halves", LARGE), ("halves", SMALL), ("pairs", LARGE))
EAGER = "eager function"

Contender = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Work = Callable[..., tuple[Tensor, ...]]

apply_rotary_pos_emb: Contender = modeling_llama.apply_rotary_pos_emb


class Rotates(nn.Module):
    """Looks the function up as an attention does, whose parameters say in which dtype the kernel is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    tables = [
        measure(pairing, heads, dtype, work, options.repeats)
        for pairing, heads in VARIANTS
        for dtype in (torch.bfloat16, torch.float32)
        for work in WORKS
    ]
    write("rope", tables)


def measure(pairing: str, heads: str, dtype: torch.dtype, work: Work, repeats: int) -> Table:
    """The microseconds of every contender at every length."""
    kind = f"{str(dtype).removeprefix('torch.')}, {work.__name__.replace('_', ' ')}"
    table = Table(f"RoPE of {pairing}, {heads}, {kind}, in µs", ("tokens", "contender", "µs", "× eager, turn by turn"))
    contenders = make_contenders(pairing, dtype)
    for tokens in LENGTHS:
        arguments = make_arguments(*HEADS[heads], tokens, dtype)
        for rotated in arguments[:2]:
            rotated.requires_grad_(work is forward_and_backward)
        assert_right(contenders, work, *arguments)
        samples = by_turns({n: partial(work, f, *arguments) for n, f in contenders.items()}, repeats)
        for contender, microseconds in samples.items():
            ratios = [e / m for e, m in zip(samples[EAGER], microseconds, strict=True)]
            table.add(tokens, contender, spread(microseconds), statistics.median(ratios))
    return table


def make_contenders(pairing: str, dtype: torch.dtype) -> dict[str, Contender]:
    globals()["apply_rotary_pos_emb"] = FUNCTIONS[pairing]
    fused, eager, compiled = (Rotates().to(dtype) for _ in range(3))
    assert manager.apply_all(fused).report.fused, "nothing was fused"
    torch.compiler.reset()
    return {"fuseplug": fused, EAGER: eager, "torch.compile": torch.compile(compiled)}


def make_arguments(heads: int, key_heads: int, head_dim: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and the gradients of both in the memory of (batch, sequence, heads, head_dim), and cos and sin."""
    q, k, grad_q, grad_k = (
        torch.randn(1, tokens, count, head_dim).to(dtype).transpose(1, 2) for count in (heads, key_heads) * 2
    )
    angles = torch.outer(torch.arange(tokens), torch.logspace(0, -4, head_dim // 2)).repeat(1, 2)[None]
    return [q, k, angles.cos().to(dtype), angles.sin().to(dtype), grad_q, grad_k]


def forward(function: Contender, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return function(q, k, cos, sin)


def forward_and_backward(
    function: Contender, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *grads: Tensor
) -> tuple[Tensor, ...]:
    out = function(q, k, cos, sin)
    return (*(y.detach() for y in out), *torch.autograd.grad(out, (q, k), grads))


WORKS = (forward, forward_and_backward)


def assert_right(functions: dict[str, Contender], work: Work, *arguments: Tensor) -> None:
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in arguments]
    eager = work(functions[EAGER], *arguments)
    if apply_rotary_pos_emb is FUNCTIONS["pairs"]:
        truth: Sequence[Tensor] = [y.double() for y in eager]  # it computes in float32 whatever it is given
    else:
        truth = work(functions[EAGER], *wide)
    for name, function in functions.items():
        for found, exact in zip(work(function, *arguments), truth, strict=True):
            error = (found.double() - exact).abs().amax() / exact.abs().amax()
            limit = 8 * torch.finfo(found.dtype).eps
            assert error <= limit, f"{name} is {error:.1e} off, allowed {limit:.1e}"


if __name__ == "__main__":
    main()
