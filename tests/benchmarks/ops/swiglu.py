"""SwiGLU: the forward reads gate and up and writes their product, the backward reads three tensors and writes two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from fuseplug import manager
from fuseplug_swiglu.reference import swiglu as reference

from ..contest.aims import moving_bytes
from ..contest.peers import compiled, of, searching
from ..contest.problems import (
    BACKWARD,
    BOTH,
    EAGER,
    FORWARD,
    LIGER,
    OURS,
    Contender,
    Function,
    Kind,
    Least,
    Op,
    Problem,
    normal,
)

HIDDEN = 1024


class Shape(NamedTuple):
    tokens: int
    inner: int


def problem(shape: Shape, kind: Kind) -> Problem:
    gate, up, grad = (normal(kind, *shape) for _ in range(3))
    size = gate.numel() * gate.element_size()
    return Problem(
        f"{shape.tokens} × {shape.inner}",
        (gate.requires_grad_(), up.requires_grad_()),
        (grad,),
        reference,
        {FORWARD: Least(3 * size), BACKWARD: Least(5 * size), BOTH: Least(8 * size)},
    )


def eager(_: Sequence[Tensor]) -> Function:
    """What the MLP of transformers computes between its projections."""
    return lambda gate, up: functional.silu(gate) * up


def applied(arguments: Sequence[Tensor]) -> Function:
    """The MLP of transformers, with its projections replaced by their results."""
    gate = arguments[0]
    mlp = Qwen3MLP(Qwen3Config(hidden_size=64, intermediate_size=gate.shape[-1])).to(gate)
    assert manager.apply_all(mlp).report.fused, "nothing was fused"
    held: list[Tensor] = []
    mlp.gate_proj.forward = lambda _: held[0]
    mlp.up_proj.forward = lambda _: held[1]
    mlp.down_proj.forward = lambda product: product

    def function(gate: Tensor, up: Tensor) -> Tensor:
        held[:] = gate, up
        return mlp(gate)

    return function


def whole(shape: Shape, kind: Kind) -> Problem:
    """An MLP with its projections, with at most a third as many hidden channels as inner ones."""
    hidden = min(HIDDEN, shape.inner // 3)
    x, grad = (normal(kind, shape.tokens, hidden) for _ in range(2))
    weights = [
        nn.Parameter(normal(kind, *sizes).mul_(sizes[1] ** -0.5))
        for sizes in ((shape.inner, hidden), (shape.inner, hidden), (hidden, shape.inner))
    ]
    moved, products = sum(weight.nbytes for weight in weights) + 2 * x.nbytes, 6 * x.numel() * shape.inner
    least = {FORWARD: Least(moved, products), BACKWARD: Least(2 * moved, 2 * products)}
    return Problem(
        f"{shape.tokens} × {shape.inner}",
        (x.requires_grad_(), *weights),
        (grad,),
        lambda x, gate, up, down: linear(reference(linear(x, gate), linear(x, up)), down),
        {**least, BOTH: Least(3 * moved, 3 * products)},
        by_row=False,
    )


def module(arguments: Sequence[Tensor]) -> Qwen3MLP:
    """The module of transformers, with the given weights."""
    _, gate, up, down = arguments
    mlp = Qwen3MLP(Qwen3Config(hidden_size=len(down), intermediate_size=len(gate))).to(gate)
    mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight = gate, up, down
    return mlp


def eager_whole(arguments: Sequence[Tensor]) -> Function:
    mlp = module(arguments)
    return lambda x, *_: mlp(x)


def applied_whole(arguments: Sequence[Tensor]) -> Function:
    mlp = module(arguments)
    assert manager.apply_all(mlp, include=["swiglu"]).report.fused, "nothing was fused"
    return lambda x, *_: mlp(x)


OP = Op(
    "swiglu",
    problem,
    shapes=[Shape(tokens, inner) for tokens in (32768, 8192) for inner in (14336, 3072, 11008)],
    single=Shape(1, 14336),
    tiny=(Shape(3, 48),),
    contenders=(
        Contender(OURS, of("fuseplug_swiglu.backends.triton:swiglu", lambda f, gate, up: f(gate, up))),
        Contender(EAGER, eager),
        compiled(eager),
        searching(eager, lambda arguments: arguments[0].shape[-1] == 14336 < arguments[0].numel()),
        # Liger-Kernel's backward writes the gradients over gate and up.
        Contender(LIGER, of("liger_kernel.ops:LigerSiLUMulFunction", lambda f, *a: f.apply(*a)), writes=True),
    ),
    applied=Contender(f"{OURS}, applied", applied),
    aim=moving_bytes,
)
