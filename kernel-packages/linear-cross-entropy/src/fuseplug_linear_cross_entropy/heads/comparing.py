"""Compares a function that scores tokens with the reference in float64: values, and the gradient of each input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import linear_cross_entropy, logits_of
from .call import DIFFERENTIABLE, OUTPUTS, HeadCall, Score

_ROUNDINGS, _WORKING_ROUNDINGS = 8.0, 64.0
"""How many roundings to allow, in the logits' dtype and in float32: as many as for heads that are replaced."""

_GRADIENT = "the gradient of "

Values = dict[str, Tensor]


class Kind(NamedTuple):
    """The features of a call that decide whether a kernel is right for it. Calls of one kind are checked once.

    Attributes:
        device_type: The type of the device that runs the call.
        hidden: The dtype of the hidden states.
        weight: The dtype of the weight.
        bias: The dtype of the bias; ``None`` if there is none.
        capped: Whether logits are capped.
        statistics: The names of the results that are wanted besides the log-probabilities.
        autocast: The dtype of autocast; ``None`` if autocast is off.
        width: The size of the hidden states.
        words: The size of the vocabulary.
    """

    device_type: str
    hidden: torch.dtype
    weight: torch.dtype
    bias: torch.dtype | None
    capped: bool
    statistics: tuple[str, ...]
    autocast: torch.dtype | None
    width: int
    words: int


@dataclass(frozen=True)
class Specimen:
    """A call to try, and its results in float64.

    Attributes:
        call: The call.
        autocast: As in `Kind`.
        truth: The results of the reference, by name.
        clear: For each token, whether its largest logit is clearly larger than the second.
    """

    call: HeadCall
    autocast: torch.dtype | None
    truth: Values
    clear: Tensor

    @classmethod
    def of(cls, kind: Kind, tokens: int, *, entropy_used: bool = True) -> Specimen:
        """A specimen of *kind*, in which half of the tokens have their likeliest label. The truth is on the CPU.

        Args:
            kind: The kind of call.
            tokens: The number of tokens.
            entropy_used: Whether the entropy is part of the sum whose gradients are compared.
        """
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

        weight = (normal(kind.words, kind.width) * (2.0 / kind.width**0.5)).to(kind.weight)
        bias = normal(kind.words).to(kind.bias) if kind.bias else None
        hidden = normal(tokens, kind.width).to(kind.hidden)
        targets = torch.arange(tokens, device="cpu") * 7919 % kind.words
        call = HeadCall(
            *(hidden, weight, bias, targets),
            temperature=0.703125,
            chunk_size=max(1, kind.words // 3),
            final_logit_softcapping=4.5 if kind.capped else None,
            logit_scale=0.4375,
            outputs=kind.statistics,
        )
        wide = call._replace(
            hidden=hidden.double(), weight=weight.double(), bias=None if bias is None else bias.double()
        )
        largest, words = logits_of(wide.hidden, wide.weight, wide.bias, wide.steps).topk(2)
        targets[::2] = words[::2, 0]
        truth = _values(lambda one: one.scored_by(linear_cross_entropy), wide, None, entropy_used=entropy_used)
        clear = largest[:, 0] - largest[:, 1] > 2 * _limit(truth["log_probs"], call, kind.autocast)
        tensors = {"hidden": hidden, "weight": weight, "bias": bias, "targets": targets}
        placed: dict[str, Any] = {
            name: None if tensor is None else tensor.to(kind.device_type) for name, tensor in tensors.items()
        }
        return cls(call._replace(**placed), kind.autocast, truth, clear)

    def deviation(self, score: Score, *, entropy_used: bool = True) -> str:
        """The first result of *score* that roundings do not explain, with its error; ``""`` if they explain all."""
        values = _values(score, self.call, self.autocast, entropy_used=entropy_used)
        if values.keys() != self.truth.keys():
            return f"it gives {', '.join(values)}; expected {', '.join(self.truth)}"
        for name, true in self.truth.items():
            value = values[name]
            if value.shape != true.shape:
                return f"{name} is {list(value.shape)}; expected {list(true.shape)}"
            if true.dtype is torch.bool:
                if not torch.equal(value[self.clear], true[self.clear]):
                    return f"{name} differs"
                continue
            limit = _limit(true if name.startswith(_GRADIENT) else self.truth["log_probs"], self.call, self.autocast)
            error = (value.double() - true).abs().max().item()
            if not error <= limit:
                return f"{name} differs from the formula by {error:.1e}; roundings explain at most {limit:.1e}"
        return ""


def _limit(scale: Tensor, call: HeadCall, autocast: torch.dtype | None) -> float:
    """The largest error to allow in a result that has the magnitude of *scale*."""
    unit = torch.finfo(autocast or call.hidden.dtype).eps / 2
    single = torch.finfo(torch.float32).eps / 2
    return (_ROUNDINGS * unit + _WORKING_ROUNDINGS * single) * float(scale.abs().max())


def _values(score: Score, call: HeadCall, autocast: torch.dtype | None, *, entropy_used: bool) -> Values:
    """The results of *score* by name, and the gradients of a weighted sum of its differentiable results."""
    leaves = {name: getattr(call, name) for name in ("hidden", "weight", "bias")}
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    kind = call.hidden.device.type
    with torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
        results = score(call._replace(**leaves))
    values = {name: value for name, value in zip(("log_probs", *OUTPUTS), results, strict=True) if value is not None}
    if others := [name for name, value in values.items() if name not in DIFFERENTIABLE and value.requires_grad]:
        raise TypeError(f"{others[0]} has a gradient, which it must not have")
    used = [values[name] for name in DIFFERENTIABLE if name in values][: 2 if entropy_used else 1]
    upstream = [torch.linspace(-1, 2 + i, len(value), device=value.device).to(value) for i, value in enumerate(used)]
    gradients = torch.autograd.grad(used, [*leaves.values()], upstream)
    named = {f"{_GRADIENT}{name}": value for name, value in zip(leaves, gradients, strict=True)}
    return {name: value.detach().cpu() for name, value in (values | named).items()}


@contextlib.contextmanager
def undisturbed(device_type: str) -> Iterator[None]:
    """Turn gradients on and autocast off, whatever the caller has set. Specimens are made and tried inside.

    Checkpointing around the caller does not see what they save, because its second run tries no specimens.
    """
    saved = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device_type, enabled=False), saved:
        yield
