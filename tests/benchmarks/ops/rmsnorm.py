"""RMSNorm: the forward reads and writes a row once, the backward reads two rows and writes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fuseplug import manager
from fuseplug_rmsnorm.reference import rms_norm as reference

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

EPS = 1e-6


class Shape(NamedTuple):
    rows: int
    hidden: int


def problem(shape: Shape, kind: Kind) -> Problem:
    x, weight, grad = normal(kind, *shape), normal(kind, shape.hidden), normal(kind, *shape)
    row = x.numel() * x.element_size()
    return Problem(
        f"{shape.rows} × {shape.hidden}",
        (x.requires_grad_(), nn.Parameter(weight)),
        (grad,),
        lambda x, weight: reference(x, weight, EPS),
        {FORWARD: Least(2 * row), BACKWARD: Least(3 * row), BOTH: Least(5 * row)},
    )


def module(arguments: Sequence[Tensor]) -> Qwen3RMSNorm:
    """The module of transformers, with the given weight."""
    norm = Qwen3RMSNorm(len(arguments[1]), EPS).to(arguments[1])
    norm.weight = arguments[1]
    return norm


def eager(arguments: Sequence[Tensor]) -> Function:
    norm = module(arguments)
    return lambda x, _: norm(x)


def applied(arguments: Sequence[Tensor]) -> Function:
    norm = module(arguments)
    assert manager.apply_all(norm).report.fused, "nothing was fused"
    return lambda x, _: norm(x)


def torch_own(_: Sequence[Tensor]) -> Function:
    return lambda x, weight: functional.rms_norm(x, weight.shape, weight, EPS)


OP = Op(
    "rmsnorm",
    problem,
    shapes=(
        *(Shape(rows, hidden) for rows in (32768, 4096) for hidden in (4096, 2048, 8192, 1024, 16384)),
        Shape(32768 * 32, 128),
    ),
    single=Shape(1, 4096),
    tiny=(Shape(3, 64),),
    contenders=(
        Contender(OURS, of("fuseplug_rmsnorm.backends.triton:rms_norm", lambda f, x, weight: f(x, weight, EPS))),
        Contender(EAGER, eager),
        Contender("F.rms_norm", torch_own),
        compiled(eager),
        searching(eager, lambda arguments: arguments[0].shape[-1] == 4096 < arguments[0].numel()),
        Contender(
            LIGER,
            # Called as Liger-Kernel's module calls it: the backward writes its result over the incoming gradient.
            of("liger_kernel.ops:LigerRMSNormFunction", lambda f, *a: f.apply(*a, EPS, 0.0, "llama", True, None)),
            writes=True,
        ),
        Contender("quack", of("quack:rmsnorm", lambda f, x, weight: f(x, weight, eps=EPS))),
    ),
    applied=Contender(f"{OURS}, applied", applied),
    aim=moving_bytes,
)
