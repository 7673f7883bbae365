"""SwiGLU: gate and up are read and the product written forwards; three are read and two written backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from fuseplug import manager
from fuseplug_swiglu.reference import swiglu as reference

from .aims import moving_bytes
from .contest import (
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
from .peers import compiled, of, searching


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
    """As the MLP of transformers has it between its projections."""
    return lambda gate, up: functional.silu(gate) * up


def applied(arguments: Sequence[Tensor]) -> Function:
    """The MLP of transformers, its projections replaced by what they would give."""
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
        # Its backward writes the gradients over gate and up.
        Contender(LIGER, of("liger_kernel.ops:LigerSiLUMulFunction", lambda f, *a: f.apply(*a)), writes=True),
    ),
    applied=Contender(f"{OURS}, applied", applied),
    aim=moving_bytes,
)
