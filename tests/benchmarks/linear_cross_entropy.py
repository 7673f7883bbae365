"""The loss of a language model's head on this machine, forward and backward: fused, eager, compiled, and torch's own.

Every contender does the same work on the same inputs and is first checked for being right; they are timed by turns, so
that a busy moment meets them all. Memory is the peak of what is resident above hidden states, weight and gradients.
With ``--entropy`` the loss has a bonus for the entropy, as in reinforcement learning, and TRL's function is one more.

    python tests/benchmarks/linear_cross_entropy.py [--repeats N] [--large] [--entropy]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from record import Table, write
from torch import Tensor
from torch.nn import functional

from fuseplug_linear_cross_entropy import linear_cross_entropy
from fuseplug_tools.bench import peak_memory, spread

EAGER = "eager"
IGNORED = -100
DTYPES = (torch.bfloat16, torch.float32)
LIMIT = 32
"""Roundings to the dtype of the inputs by which a contender may be off, as a share of the largest true magnitude."""

Contender = Callable[[Tensor, Tensor, Tensor], Tensor]


class Size(NamedTuple):
    """Of the inputs."""

    tokens: int
    hidden: int
    words: int

    def __str__(self) -> str:
        return f"{self.tokens} × {self.hidden} × {self.words}"


SIZES = (Size(512, 512, 32000), Size(2048, 512, 32000), Size(512, 1024, 151936))
LARGE = (Size(2048, 1024, 151936),)
WITH_ENTROPY = (Size(1024, 1024, 151936),)
BONUS = 0.1
"""For the entropy, in the loss that has one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="at least 2")
    parser.add_argument("--large", action="store_true", help=f"also {LARGE[0]}, which takes eager 50 s in float32")
    parser.add_argument("--entropy", action="store_true", help=f"{WITH_ENTROPY[0]} in bfloat16, with TRL")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    sizes = WITH_ENTROPY if options.entropy else (*SIZES, *(LARGE if options.large else ()))
    tables = {dtype: table_of(dtype) for dtype in (DTYPES[:1] if options.entropy else DTYPES)}
    contenders = make_contenders_with_entropy() if options.entropy else make_contenders()
    for size in sizes:
        truth = exact(contenders[EAGER], *inputs(size, torch.float64))
        for dtype, table in tables.items():
            measure(contenders, size, dtype, truth, options.repeats, table)
    write(
        "linear_cross_entropy" + "_with_entropy" * options.entropy, list(tables.values()), {"load at the start": load}
    )


def table_of(dtype: torch.dtype) -> Table:
    title = f"Linear cross-entropy, {str(dtype).removeprefix('torch.')}, forward and backward"
    columns = ("tokens × hidden × words", "contender", "ms", f"× {EAGER}, turn by turn", "peak, MB")
    return Table(title, columns)


def measure(
    contenders: dict[str, Contender],
    size: Size,
    dtype: torch.dtype,
    truth: tuple[Tensor, ...],
    repeats: int,
    table: Table,
) -> None:
    """Add the milliseconds and the memory of every contender to *table*."""
    hidden, weight, labels = inputs(size, dtype)
    for name, function in contenders.items():
        assert_right(name, step(function, hidden, weight, labels), truth)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, function in contenders.items():
            ms, megabytes = turn_of(function, hidden, weight, labels)
            samples[name].append(ms)
            peaks[name].append(megabytes)
    for name, times in samples.items():
        ratios = [e / m for e, m in zip(samples[EAGER], times, strict=True)]
        table.add(str(size), name, spread(times), statistics.median(ratios), statistics.median(peaks[name]))


def inputs(size: Size, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels, a seventh of these ignored: the same numbers in every dtype."""
    torch.manual_seed(0)
    coarsest = DTYPES[0]
    hidden = torch.randn(size.tokens, size.hidden).to(coarsest).to(dtype).requires_grad_()
    weight = (torch.randn(size.words, size.hidden) * size.hidden**-0.5).to(coarsest).to(dtype).requires_grad_()
    labels = torch.randint(0, size.words, (size.tokens,))
    labels[::7] = IGNORED
    return hidden, weight, labels


def make_contenders() -> dict[str, Contender]:
    def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(widened(functional.linear(hidden, weight)), labels)

    torch.compiler.reset()
    contenders: dict[str, Contender] = {"fuseplug": linear_cross_entropy, EAGER: eager}
    contenders["torch.compile"] = torch.compile(lambda *tensors: eager(*tensors))
    if hasattr(functional, "linear_cross_entropy"):  # since torch 2.13
        # Its chunked way, which saves memory, is left out: it takes many times as long.
        contenders["F.linear_cross_entropy"] = functional.linear_cross_entropy
    return contenders


def make_contenders_with_entropy() -> dict[str, Contender]:
    from trl.kernels import ChunkedLogProbFunction

    def fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(hidden, weight, labels, reduction="none", statistics=("entropy",))[:2]

    def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = functional.log_softmax(widened(functional.linear(hidden, weight)), -1)
        return functional.nll_loss(logprobs, labels, reduction="none"), -(logprobs.exp() * logprobs).sum(-1)

    def trl(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # With the size of chunks that TRL's trainers use.
        found = ChunkedLogProbFunction.apply(
            hidden, weight, None, labels.clamp(min=0), 1.0, 32768, None, 1.0, ("entropy",)
        )
        return -found[0], found[1]

    def rewarded(per_token: Callable[..., tuple[Tensor, Tensor]]) -> Contender:
        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            counts = labels != IGNORED
            losses, entropies = per_token(hidden, weight, labels)
            return ((losses - BONUS * entropies) * counts).sum() / counts.sum()

        return loss

    return {"fuseplug": rewarded(fused), EAGER: rewarded(eager), "TRL": rewarded(trl)}


def widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def step(function: Contender, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the gradients."""
    hidden.grad = weight.grad = None
    loss = function(hidden, weight, labels)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def turn_of(function: Contender, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, float]:
    """Milliseconds, and megabytes above the inputs and gradients."""
    milliseconds: list[float] = []

    def run() -> None:
        start = time.perf_counter()
        step(function, hidden, weight, labels)
        milliseconds.append((time.perf_counter() - start) * 1e3)

    hidden.grad = weight.grad = None
    peak = peak_memory(run)
    return milliseconds[0], math.nan if peak is None else (peak - hidden.nbytes - weight.nbytes) / 1e6


def exact(mean: Contender, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of inputs in float64, a few tokens at a time."""
    counted, total = int((labels != IGNORED).sum()), torch.zeros((), dtype=torch.float64)
    for x, y in zip(hidden.split(128), labels.split(128), strict=True):
        loss = mean(x, weight, y) * int((y != IGNORED).sum()) / counted
        loss.backward(inputs=[hidden, weight])
        total += loss.detach()
    return total, hidden.grad, weight.grad


def assert_right(name: str, found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    eps = torch.finfo(found[1].dtype).eps
    for what, ours, theirs in zip(("loss", "gradient of hidden", "gradient of weight"), found, truth, strict=True):
        # By parts, since in float64 the difference of the largest weights takes as much memory as all the rest.
        parts = zip(ours.reshape(-1).split(1 << 24), theirs.reshape(-1).split(1 << 24), strict=True)
        error = max(float((a.double() - b).abs().amax()) for a, b in parts) / float(theirs.abs().amax())
        assert error <= LIMIT * eps, f"{what} of {name} is {error:.1e} off, allowed {LIMIT * eps:.1e}"


if __name__ == "__main__":
    main()
