"""Finds a head whose scores are lazy during calls with labels."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug import Adapter, Consent, Example, Proposal, Scope, Target
from fuseplug_linear_cross_entropy.lazy_tensor import LazyTensor

from .sites import FLOATS, match_norm

WIDTH, SCORES = 16, 11


class Scores(LazyTensor):
    def foreseen(self, function, args, kwargs):
        if torch.is_autocast_enabled(self.device.type):
            return NotImplemented
        if function is Tensor.reshape:
            return self.then(function, args, kwargs)
        if function is functional.cross_entropy:
            x, weight = self.facts["read"]
            return self.facts["compute"](x.reshape(-1, x.shape[-1]), weight, args[1])
        return NotImplemented


@dataclass(frozen=True)
class HeadAdapter(Adapter):
    variant: str = "plain"
    lazy: type = Scores
    under_autocast: bool = False
    reads: ClassVar[tuple[str, ...]] = ("weight",)

    def bind(self, compute):
        def forward(module, x):
            weight = module.weight
            if torch.is_autocast_enabled(x.device.type) and not self.under_autocast:
                return NotImplemented
            return self.lazy.standing_for(functional.linear, x, weight, read=(x, weight), compute=compute)

        return forward


def with_labels(module, arguments):
    return arguments["labels"] is not None


LABELLED = Scope(with_labels)
CONSENT = Consent("lazy_scores", "the scores are computed when something uses them")


def labels_for(count, device="cpu"):
    return torch.arange(count, device=device) * 7 % SCORES


def loss_of(scores):
    rows = scores.reshape(-1, SCORES)
    return functional.cross_entropy(rows, labels_for(len(rows), rows.device))


def head_example(dtype, size, generator):
    x = torch.randn(2, max(3, -(-size // WIDTH // 2)), WIDTH, generator=generator)
    weight = torch.randn(SCORES, WIDTH, generator=generator)
    return Example([x.to(dtype)], {"weight": weight.to(dtype)}, after=loss_of)


def match_head(site, adapter=HeadAdapter(), scope=LABELLED, consent=CONSENT):
    if not hasattr(site.module, "head"):
        return None
    return [
        Proposal(
            Target(path="head"),
            (adapter,),
            head_example,
            FLOATS,
            roundings=8.0,
            working_roundings=64.0,
            exact=False,
            likely=FLOATS[1:],
            scope=scope,
            lazy=adapter.lazy,
            consent=consent,
        )
    ]


def match_pair(site):
    """Propose to replace the first of two norms, and the second beside the first."""
    if not hasattr(site.module, "second"):
        return None
    first, second = (
        replace(match_norm(replace(site, module=getattr(site.module, name)))[0], target=Target(path=name))
        for name in ("first", "second")
    )
    return [replace(first, beside=(second,))]
