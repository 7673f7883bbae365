"""Finds the sites of the kernels."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fuseplug import Adapter, Example, Proposal, Target, called_functions

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NormAdapter(Adapter):
    variant: str
    offset: float
    reads: ClassVar[tuple[str, ...]] = ("weight", "eps")

    def bind(self, compute):
        offset = self.offset

        def forward(module, x):
            return compute(x, module.weight, module.eps, offset)

        return forward


@dataclass(frozen=True)
class Plain(Adapter):
    variant: str = "plain"

    def bind(self, compute):
        return lambda *args: compute(*args)


@dataclass(frozen=True)
class Method(Adapter):
    variant: str = "plain"

    def bind(self, compute):
        return lambda module, *args: compute(*args)


@dataclass(frozen=True)
class CallsAChild(Adapter):
    variant: str = "plain"

    def bind(self, compute):
        def forward(module, x):
            gate, up = x.chunk(2, -1)
            return compute(module.act(gate), up)

        return forward


def match_norm(site, adapters=(NormAdapter("plain", 0.0), NormAdapter("offset", 1.0))):
    weight = getattr(site.module, "weight", None)
    if weight is None or weight.dim() != 1 or not isinstance(getattr(site.module, "eps", None), float):
        return None
    hidden = weight.shape[0]
    mixes = [(x, w) for x in FLOATS for w in (x, torch.float32)]

    def example(mix, size, generator):
        rows = max(4, -(-size // hidden // 2))
        scale = torch.tensor([1.0, 1e-3, 30.0, 0.1]).repeat(rows // 4 + 1)[:rows, None]
        x = torch.randn(2, rows, hidden, generator=generator) * scale
        weight = torch.randn(hidden, generator=generator)
        return Example([x.to(mix[0])], {"weight": weight.to(mix[1])})

    return [Proposal(Target(), adapters, example, tuple(dict.fromkeys(mixes)))]


@dataclass(frozen=True)
class NamedNormAdapter(Adapter):
    """Takes the same keyword arguments as `NamedNorm`, and leaves centred calls to the original."""

    variant: str
    offset: float
    reads: ClassVar[tuple[str, ...]] = ("eps",)

    def bind(self, compute):
        offset = self.offset

        def forward(module, x, *, weight, shift=None, centred=False, dtype=None):
            if centred:
                return NotImplemented
            made = compute(x, weight, module.eps, offset)
            if shift is not None:
                made = made + shift
            return made if dtype is None else made.to(dtype)

        return forward


NAMED = (
    {},
    {"shift": True},
    {"shift": True, "dtype": torch.bfloat16},
    {"shift": None, "centred": False, "dtype": None},
)
"""Keyword arguments for `NamedNorm` besides its weight. ``True`` stands for a tensor."""


def match_named_norm(site):
    if not isinstance(getattr(site.module, "eps", None), float) or site.module._parameters:
        return None
    mixes = [(x, w, 0) for x in FLOATS for w in (x, torch.float32)]
    mixes += [(x, x, number) for number in range(1, len(NAMED)) for x in FLOATS]

    def example(mix, size, generator):
        rows = max(4, -(-size // 32))
        scale = torch.tensor([1.0, 1e-3, 30.0, 0.1]).repeat(rows // 4 + 1)[:rows, None]
        x = torch.randn(2, rows, 16, generator=generator) * scale
        weight, shift = torch.randn(2, 16, generator=generator)
        more = {name: shift.to(mix[0]) if value is True else value for name, value in NAMED[mix[2]].items()}
        return Example([x.to(mix[0])], kwargs={"weight": weight.to(mix[1]), **more})

    adapters = (NamedNormAdapter("plain", 0.0), NamedNormAdapter("offset", 1.0))
    return [Proposal(Target(), adapters, example, tuple(dict.fromkeys(mixes)))]


def match_gated(site):
    if site.module._parameters or site.module._modules or site.module._buffers:
        return None

    def example(dtype, size, generator):
        return Example([(4 * torch.randn(2, -(-size // 28), 14, generator=generator)).to(dtype)])

    return [Proposal(Target(), (Method(),), example, FLOATS)]


def match_rotary(site):
    forward = type(site.module).forward
    if "apply_rotary" not in called_functions(forward):
        return None

    def example(dtype, size, generator):
        length = max(5, -(-size // 48))
        q, k = (torch.randn(2, heads, length, 8, generator=generator).to(dtype) for heads in (3, 1))
        cos, sin = (torch.randn(1, 1, length, 8, generator=generator).to(dtype) for _ in range(2))
        return Example([q, k, cos, sin])

    return [Proposal(Target("forward", "apply_rotary"), (Plain(),), example, FLOATS, roundings=8.0)]


def match_product(site, adapter=CallsAChild()):
    if not hasattr(site.module, "act"):
        return None

    def example(dtype, size, generator):
        x = torch.randn(2, -(-size // 28), 14, generator=generator).to(dtype)
        return Example([x], {}, {"act": torch.nn.PReLU(init=0.2, dtype=dtype)})

    return [Proposal(Target(), (adapter,), example, FLOATS)]
