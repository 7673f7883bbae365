"""A model with a head whose result is needed only as a sum, and a kernel that computes the sum without the result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuseplug import Adapter, BaseKernel, Consent, Example, Proposal, Scope, Target
from fuseplug_linear_cross_entropy.lazy_tensor import LazyTensor

ran = Counter()
"""How often the kernel computed a sum."""


class Model(nn.Module):
    """Returns its scores twice or, with labels, their sum and the scores."""

    def __init__(self, width=8, scores=11):
        super().__init__()
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, scores, bias=False)

    def forward(self, x, labels=None, **kwargs):
        scores = self.head(self.body(x))
        return (scores if labels is None else scores.float().sum()), scores


def sum_of_linear(x, weight):
    """``F.linear(x, weight).sum()``, as the original computes it."""
    return functional.linear(x, weight).sum()


def quick_sum(x, weight):
    """The sum that `sum_of_linear` computes, without the scores."""
    ran["sum"] += 1
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.reshape(-1, x.shape[-1])
    return (rows.to(wide).sum(0) @ weight.to(wide).sum(0)).to(x.dtype)


def wrong_sum(x, weight):
    return quick_sum(x, weight) * 1.01


class Scores(LazyTensor):
    def foreseen(self, function, args, kwargs):
        if function is Tensor.float and self.dtype is torch.float32:
            return self.then(function, args, kwargs)
        if function is Tensor.sum and len(args) == 1 and not kwargs:
            compute, x, weight = self.facts["sum"]
            return compute(x, weight)
        return NotImplemented


class OtherScores(Scores):
    """Becomes something other than what it stands for."""

    @classmethod
    def standing_for(cls, make, *inputs, **facts):
        return super().standing_for(lambda *tensors: make(*tensors) * 1.5, *inputs, **facts)


@dataclass(frozen=True)
class HeadAdapter(Adapter):
    variant: str = "plain"
    lazy: type = Scores

    @property
    def reads(self):
        return ("weight",)

    def bind(self, compute):
        def forward(module, x):
            weight = module.weight
            return self.lazy.standing_for(functional.linear, x, weight, sum=(compute, x, weight))

        return forward


def with_labels(module, arguments):
    return arguments["labels"] is not None


class SumKernel(BaseKernel):
    """Replaces the head during calls with labels, and asks for consent."""

    kernel_id = "toy_sum"
    op = "toysum"
    function = "support.heads:quick_sum"
    reference = "support.heads:sum_of_linear"
    check_sizes = (256,)
    lazy = Scores
    declared = Scores
    scope = Scope(with_labels)
    consent = Consent("lazy_scores", "the scores are computed when something uses them")

    def match(self, site):
        if not isinstance(site.module, Model):
            return None

        def example(dtype, size, generator):
            x = torch.randn(2, max(3, size // 16), 8, generator=generator)
            weight = torch.randn(11, 8, generator=generator)
            return Example([x.to(dtype)], {"weight": weight.to(dtype)}, after=Tensor.sum)

        proposal = Proposal(
            Target(path="head"),
            (HeadAdapter(lazy=self.lazy),),
            example,
            (torch.float32, torch.bfloat16),
            exact=False,
            working_roundings=64.0,
            scope=self.scope,
            lazy=self.declared,
            consent=self.consent,
        )
        return [self.changed(proposal)]

    def changed(self, proposal):
        return proposal


class FreeSumKernel(SumKernel):
    """Asks for no consent."""

    kernel_id = "toy_free_sum"
    consent = None


class UnscopedSumKernel(FreeSumKernel):
    """Replaces the head in all calls."""

    kernel_id = "toy_unscoped_sum"
    scope = None


def beside(proposal, *others):
    """*proposal*, with *others* to be applied together with it."""
    return replace(proposal, beside=others)
