"""What the kernels recognise, and how modules call them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fuseplug import Adapter, Consent, Example, Proposal, Rejection, Scope, Target, called_functions

MIXES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Calling(Adapter):
    """One that has a weight, and perhaps a bias."""

    variant: str
    bias: bool

    @property
    def reads(self):
        return ("weight", "bias") if self.bias else ("weight",)

    def bind(self, compute):
        with_bias = self.bias

        def forward(self, x):
            return compute(x, self.weight, self.bias if with_bias else None)

        return forward


def match(site):
    module = site.module
    names = set(module._parameters)
    if names not in ({"weight"}, {"weight", "bias"}) or module._modules or module.weight.dim() != 1:
        return None
    if getattr(module, "cubed", False):
        return Rejection("it is cubed: square it")
    width = module.weight.shape[0]

    def example(mix, size, generator):
        x = torch.randn(max(size // width, 2), width, generator=generator).to(mix)
        parameters = {name: (torch.rand(width, generator=generator) + 0.5).to(mix) for name in sorted(names)}
        return Example(args=(x,), parameters=parameters)

    adapter = Calling("biased", bias=True) if "bias" in names else Calling("plain", bias=False)
    first = module.weight.dtype
    mixes = (first, *(mix for mix in MIXES if mix != first))
    return [
        Proposal(
            target=Target("forward"),
            adapters=(adapter,),
            example=example,
            mixes=mixes,
            roundings=6.0,
            working_roundings=64.0,
        )
    ]


@dataclass(frozen=True)
class Capping(Adapter):
    """A function of scores and their limit."""

    variant: str = "tanh"

    def bind(self, compute):
        def capped(scores, limit):
            return compute(scores, limit)

        return capped


def match_soft_cap(site):
    def example(mix, size, generator):
        return Example(args=((80 * torch.randn(4, max(size // 4, 1), generator=generator)).to(mix), 50.0))

    names = [name for name in called_functions(type(site.module).forward) if name == "soft_cap"]
    return [Proposal(Target("forward", name), (Capping(),), example, MIXES) for name in names]


@dataclass(frozen=True)
class Projecting(Adapter):
    """A projection without a bias."""

    variant: str = "projection"

    @property
    def reads(self):
        return ("weight",)

    def bind(self, compute):
        def forward(self, x):
            return compute(x, self.weight)

        return forward


def _with_labels(module, arguments):
    return arguments["labels"] is not None


def match_tail(site):
    if not isinstance(site.module._modules.get("tail"), nn.Linear):
        return None

    def example(mix, size, generator):
        x = torch.randn(max(size // 8, 2), 8, generator=generator)
        return Example(args=(x,), parameters={"weight": torch.randn(11, 8, generator=generator)})

    return [
        Proposal(
            Target(path="tail"),
            (Projecting(),),
            example,
            mixes=(torch.float32,),
            exact=False,
            working_roundings=64.0,
            scope=Scope(_with_labels),
            consent=Consent("other_sums", "sums are added in another order"),
            work=1.0,
        )
    ]


@dataclass(frozen=True)
class Doubling(Adapter):
    """One that takes the positive part first, or does not."""

    variant: str
    positive: bool

    def bind(self, compute):
        positive = self.positive

        def method(self, x):
            return compute(x, positive)

        return method


def match_doubled(site):
    if not isinstance(site.module._modules.get("inner"), nn.ReLU):
        return None

    def example(mix, size, generator):
        x = torch.randn(max(size // 16, 2), 16, generator=generator).to(mix)
        return Example(args=(x,), children={"inner": nn.ReLU()})

    beside = Proposal(Target("double"), (Doubling("all", positive=False),), example, MIXES)
    first = (Doubling("positive", positive=True),)
    return [Proposal(Target(), first, example, MIXES, covers=("inner",), beside=(beside,), likely=MIXES[:1])]
