"""The contests on a CPU: the ops of all benchmarks, with sizes for two cores and the contenders there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..contest.aims import GROUPED
from ..contest.peers import Make, of
from ..contest.problems import COMPILED, EAGER, OURS, Contender, Function, LeftOut, Op
from ..ops import decoding, linear_attention, linear_cross_entropy, moe, rmsnorm, rope, swiglu

BATCHED, BATCHED_UP_TO = "batched_mm", 16
"""A contender, and the most tokens with which it is measured: it copies a matrix for each of their experts."""


@dataclass(frozen=True)
class Contest:
    """One op to time, with a table for each dtype and work.

    Attributes:
        op: The contenders and the shapes.
        title: The beginning of the tables' titles.
        shape: The heading of the column of shapes: the sizes that make up a shape.
        baseline: The contender with whose time the others' are compared.
        milliseconds: Whether times are in milliseconds instead of microseconds.
        memory: Whether peaks of memory are measured, too.
        matmuls: Whether the op consists mostly of matmuls. If so, it is not measured in emulated bfloat16.
        judged: For a shape that is timed, the shape at which results are checked.
        long: More shapes, which take minutes.
    """

    op: Op
    title: str
    shape: str
    baseline: str = EAGER
    milliseconds: bool = False
    memory: bool = False
    matmuls: bool = True
    judged: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape
    long: Sequence[tuple[int, ...]] = ()


def compiled(eager: Make) -> Contender:
    return Contender(COMPILED, lambda arguments: torch.compile(eager(arguments)))


def on_cpu(op: Op, ours: Make, *others: Contender, eager: Make, shapes: Sequence[tuple[int, ...]]) -> Op:
    return replace(op, shapes=shapes, contenders=(Contender(OURS, ours), Contender(EAGER, eager), *others))


def batched(arguments: Sequence[Tensor]) -> Function:
    if len(arguments[0]) > BATCHED_UP_TO:
        raise LeftOut(f"it is for {BATCHED_UP_TO} tokens at the most")
    return moe.batched(arguments)


def rotation(kind: str, *heads: int, pairs: bool = False) -> Contest:
    op = replace(rope.OP, problem=partial(rope.problem, pairs=pairs))
    eager = (lambda _: rope.rotate_pairs) if pairs else rope.eager
    shapes = [rope.Shape(1, tokens, *heads) for tokens in (1, 16, 128, 512, 2048)]
    op = on_cpu(op, partial(rope.applied, pairs=pairs), compiled(eager), eager=eager, shapes=shapes)
    title = "RoPE of {}, {} and {} heads of {}".format(kind, *heads)
    return Contest(op, title, "rows × tokens", matmuls=False)


def recurrence(recurrence: linear_attention.Recurrence, title: str, *tokens: int, long: Sequence[int]) -> Contest:
    return Contest(
        recurrence.op(*tokens),
        title,
        "tokens",
        milliseconds=True,
        memory=True,
        judged=lambda shape: linear_attention.Shape(min(*shape, linear_attention.FEW)),
        long=[linear_attention.Shape(count) for count in long],
    )


NORM = on_cpu(
    rmsnorm.OP,
    rmsnorm.applied,
    Contender("F.rms_norm", rmsnorm.torch_own),
    compiled(rmsnorm.eager),
    eager=rmsnorm.eager,
    shapes=[rmsnorm.Shape(rows, 2048) for rows in (1, 16, 128, 2048)],
)
GATE = on_cpu(
    swiglu.OP,
    of("fuseplug_swiglu:swiglu", lambda f, gate, up: f(gate, up)),
    compiled(swiglu.eager),
    eager=swiglu.eager,
    shapes=[swiglu.Shape(rows, inner) for inner in (3072, 11008) for rows in (512, 2048)],
)
MLP = on_cpu(
    replace(swiglu.OP, problem=swiglu.whole),
    swiglu.applied_whole,
    compiled(swiglu.eager_whole),
    eager=swiglu.eager_whole,
    shapes=[swiglu.Shape(rows, inner) for inner in (3072, 11008) for rows in (1, 16, 128, 512)],
)
SIZES = ((8, 2, 512, 1024), (64, 8, 256, 512))
"""The number of experts, the number of experts for each token, and the widths of an expert."""
EXPERTS = on_cpu(
    moe.OP,
    moe.applied,
    Contender(GROUPED, moe.by(GROUPED)),
    Contender(BATCHED, batched),
    compiled(moe.by(GROUPED)),
    eager=moe.by("eager"),
    shapes=[moe.Shape(tokens, *size) for size in SIZES for tokens in (1, 16, 128, 512, 2048)],
)
LOSS = on_cpu(
    linear_cross_entropy.OP,
    of(
        "fuseplug_linear_cross_entropy:linear_cross_entropy", lambda f, hidden, *rest: f(hidden, *rest).to(hidden.dtype)
    ),
    compiled(linear_cross_entropy.eager),
    # torch's chunked option, which saves memory, is left out: it takes many times as long.
    Contender(linear_cross_entropy.TORCH, of("torch.nn.functional:linear_cross_entropy", lambda f, *rest: f(*rest))),
    eager=linear_cross_entropy.eager,
    shapes=[linear_cross_entropy.Shape(*size) for size in ((512, 512, 32000), (2048, 512, 32000), (512, 1024, 151936))],
)
REWARD = on_cpu(
    replace(linear_cross_entropy.OP, problem=linear_cross_entropy.with_entropy),
    lambda _: linear_cross_entropy.rewarded(linear_cross_entropy.fused_with_entropy),
    Contender("TRL", linear_cross_entropy.trl_with_entropy),
    eager=lambda _: linear_cross_entropy.rewarded(linear_cross_entropy.eager_with_entropy),
    shapes=[linear_cross_entropy.Shape(1024, 1024, 151936)],
)

LOSSES = "tokens × hidden × words"
CONTESTS: Mapping[str, Sequence[Contest]] = {
    "rmsnorm": [Contest(NORM, "RMSNorm, hidden 2048", "rows × hidden", matmuls=False)],
    "swiglu": [
        Contest(GATE, "SwiGLU, between the projections", "rows × intermediate"),
        Contest(MLP, f"SwiGLU, the whole MLP, hidden {swiglu.HIDDEN}", "rows × intermediate"),
    ],
    "rope": [
        rotation("halves", 32, 8, 128),
        rotation("halves", 8, 4, 64),
        rotation("pairs", 32, 8, 128, pairs=True),
    ],
    "moe": [Contest(EXPERTS, "Experts", "tokens, size", baseline=GROUPED, long=[moe.Shape(16, 128, 8, 2048, 768)])],
    "linear_cross_entropy": [
        Contest(
            LOSS,
            "Linear cross-entropy",
            LOSSES,
            milliseconds=True,
            memory=True,
            matmuls=False,
            long=[linear_cross_entropy.Shape(2048, 1024, 151936)],
        )
    ],
    "linear_cross_entropy_with_entropy": [
        Contest(REWARD, "Linear cross-entropy, with a bonus for entropy", LOSSES, milliseconds=True, memory=True)
    ],
    "linear_attention": [
        recurrence(
            linear_attention.CONVOLUTION, "Causal convolution, 4096 channels, width 4", 512, 2048, 4096, long=[16384]
        ),
        recurrence(linear_attention.GATED_DELTA_NET, "Gated DeltaNet, 16 heads of 128", 512, 2048, 4096, long=[16384]),
        recurrence(
            linear_attention.KIMI_DELTA_ATTENTION, "Kimi Delta Attention, 4 heads of 128", 512, 1024, 2048, long=[4096]
        ),
        recurrence(
            linear_attention.SELECTIVE_SCAN, "Selective scan, 256 channels of 16 states", 128, 512, 1024, long=[2048]
        ),
        recurrence(
            linear_attention.CHUNK_SCAN, "Chunk scan, 16 heads of 64 × 128 states", 512, 2048, 4096, long=[16384]
        ),
        Contest(decoding.DELTA_RULE_STEP, "Gated DeltaNet, a step of heads of 128", "sequences × heads"),
        Contest(decoding.SCAN_STEP, f"Selective scan, a step of {decoding.STATES} states", "sequences × channels"),
        Contest(decoding.CHUNK_STEP, "Chunk scan, a step of heads of 64 × 128 states", "sequences × heads"),
    ],
}
"""The contests, by the file of docs/results that has their tables."""

ON_REQUEST = ("linear_cross_entropy_with_entropy",)
"""Files that no page shows. TRL is a contender, and takes minutes."""
