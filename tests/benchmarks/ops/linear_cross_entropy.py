"""The loss of a language model: three products of hidden states, weight and the logits' gradient, if logits are kept.

All contenders return the loss in the dtype of the hidden states, because `F.linear_cross_entropy` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from fuseplug import manager
from fuseplug_linear_cross_entropy import linear_cross_entropy
from fuseplug_linear_cross_entropy.reference import linear_cross_entropy as reference

from ..contest.aims import loss_head
from ..contest.peers import compiled, imported, of
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

TORCH = "F.linear_cross_entropy"
BONUS = 0.1
"""The weight of the entropy in the loss that rewards it, as in reinforcement learning."""


class Shape(NamedTuple):
    tokens: int
    hidden: int
    words: int


def problem(shape: Shape, kind: Kind) -> Problem:
    tokens, hidden, words = shape
    labels = torch.randint(words, (tokens,), device=kind.device)
    weight = normal(kind, words, hidden).mul_(hidden**-0.5)
    return Problem(
        f"{tokens} × {hidden} × {words}",
        (normal(kind, tokens, hidden).requires_grad_(), nn.Parameter(weight), labels),
        (torch.ones((), device=kind.device, dtype=kind.dtype),),
        lambda hidden, weight, labels: reference(hidden, weight, labels).to(hidden.dtype),
        _least(shape, kind.dtype.itemsize),
        # Float32 is three orders of magnitude finer than bfloat16. In float64, most GPUs would take minutes.
        wide=torch.float32 if kind.dtype is torch.bfloat16 else torch.float64,
        by_row=False,
    )


def _least(shape: Shape, itemsize: int) -> dict[str, Least]:
    """Hidden states and weight are read each way, and their gradients are written. Logits are neither."""
    tokens, hidden, words = shape
    matrices = itemsize * (tokens + words) * hidden
    forward = Least(matrices, 2 * tokens * words * hidden)
    both = Least(3 * matrices, 3 * forward.flops)
    # A backward whose gradients the forward has made only reads and writes them.
    return {FORWARD: forward, BACKWARD: Least(2 * matrices), BOTH: both}


def eager(_: Sequence[Tensor]) -> Function:
    """The loss as transformers computes it."""

    def function(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, weight).float()
        return functional.cross_entropy(logits, labels).to(hidden.dtype)

    return function


def applied(arguments: Sequence[Tensor]) -> Function:
    """A model of transformers whose layers are replaced by their result."""
    hidden, weight, _ = arguments
    words, width = weight.shape
    config = Qwen3Config(
        vocab_size=words, hidden_size=width, intermediate_size=8, num_hidden_layers=0, num_attention_heads=1
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.lm_head.weight = weight
    assert manager.apply_all(model, device=hidden.device.type, allow=["lazy_logits"]).report.fused, "nothing was fused"
    held: list[Tensor] = []
    model.model.forward = lambda **_: BaseModelOutputWithPast(last_hidden_state=held[0])

    def function(hidden: Tensor, _weight: Tensor, labels: Tensor) -> Tensor:
        held[:] = [hidden[None]]
        return model(shift_labels=labels[None], labels=labels[None]).loss.to(hidden.dtype)

    return function


def _liger(function, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Liger-Kernel's loss with sums in float32, as in ours. By default, each chunk rounds the weight's gradient."""
    options = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)
    return function.apply(hidden, weight, labels, *options)[0].to(hidden.dtype)


def with_entropy(shape: Shape, kind: Kind) -> Problem:
    """The mean over the tokens of the loss less `BONUS` times the entropy."""
    return replace(problem(shape, kind), exact=rewarded(eager_with_entropy))


def rewarded(per_token: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        losses, entropies = per_token(hidden, weight, labels)
        return (losses - BONUS * entropies).mean().to(hidden.dtype)

    return loss


def eager_with_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden, weight)
    logp = functional.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return functional.nll_loss(logp, labels, reduction="none"), -(logp.exp() * logp).sum(-1)


def fused_with_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return linear_cross_entropy(hidden, weight, labels, reduction="none", statistics=("entropy",))[:2]


def trl_with_entropy(_: Sequence[Tensor]) -> Function:
    """TRL's function, with the size of chunks that its trainers use."""
    function = imported("trl.kernels:ChunkedLogProbFunction")

    def per_token(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        results = function.apply(hidden, weight, None, labels, 1.0, 32768, None, 1.0, ("entropy",))
        return -results[0], results[1]

    return rewarded(per_token)


OP = Op(
    "linear_cross_entropy",
    problem,
    shapes=[
        Shape(tokens, *size) for tokens in (8192, 2048) for size in ((4096, 128256), (2048, 151936), (4096, 32000))
    ],
    single=Shape(1, 2048, 151936),
    tiny=(Shape(5, 16, 70),),
    contenders=(
        Contender(
            OURS,
            of(
                "fuseplug_linear_cross_entropy.backends.triton:linear_cross_entropy",
                lambda f, hidden, *rest: f(hidden, *rest).to(hidden.dtype),
            ),
        ),
        Contender(EAGER, eager),
        compiled(eager),
        Contender(TORCH, of("torch.nn.functional:linear_cross_entropy", lambda f, *arguments: f(*arguments))),
        Contender(
            f"{TORCH}, chunked",
            of("torch.nn:LinearCrossEntropyOptions", lambda o, *a: functional.linear_cross_entropy(*a, options=o())),
        ),
        Contender(LIGER, of("liger_kernel.ops:LigerFusedLinearCrossEntropyFunction", _liger)),
    ),
    applied=Contender(f"{OURS}, applied", applied),
    aim=loss_head,
)
