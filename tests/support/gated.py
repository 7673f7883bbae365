"""A right kernel for gated MLPs, whose adapter calls only the projections."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fuseplug import Adapter, BaseKernel, Example, Proposal, Target

from .kernels import ran

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def gate_reference(gate, up, activation):
    return ACTIVATIONS[activation](gate) * up


def quiet_gate(gate, up, activation):
    if activation == "silu":
        return gate * up / (1 + torch.exp(-gate))
    return up * ACTIVATIONS[activation](gate)


def fused_gate(gate, up, activation):
    ran["gated"] += 1
    return quiet_gate(gate, up, activation)


@dataclass(frozen=True)
class GatedAdapter(Adapter):
    """``down(act(gate(x)) * up(x))``, with activation and product computed by the kernel."""

    variant: str
    names: tuple[str, str, str]

    def bind(self, compute):
        (gate, up, down), activation = self.names, self.variant

        def gated(module, x):
            inner = compute(getattr(module, gate)(x), getattr(module, up)(x), activation)
            return getattr(module, down)(inner)

        return gated


class GatedKernel(BaseKernel):
    kernel_id = "toy_gated"
    op = "toygated"
    function = "support.gated:fused_gate"
    reference = "support.gated:gate_reference"
    check_sizes = (512,)
    dtypes = (torch.float32, torch.bfloat16)

    def match(self, site):
        for names in (("gate", "up", "down"), ("gate_proj", "up_proj", "down_proj")):
            if all(isinstance(getattr(site.module, name, None), nn.Linear) for name in names):
                return [self.proposal(site.module, names)]
        return None

    def proposal(self, module, names):
        shapes = {name: getattr(module, name).weight.shape for name in names}
        biased = {name: getattr(module, name).bias is not None for name in names}

        def example(dtype, size, generator):
            def linear(name):
                out, width = shapes[name]
                made = nn.Linear(width, out, bias=biased[name])
                for parameter in made.parameters():
                    parameter.data = torch.randn(parameter.shape, generator=generator).div(width**0.5)
                return made.to(dtype)

            width = shapes[names[0]][1]
            x = torch.randn(max(4, size // width), width, generator=generator).to(dtype)
            return Example([x], children={name: linear(name) for name in names})

        adapters = tuple(GatedAdapter(each, names) for each in ACTIVATIONS)
        return Proposal(Target(), adapters, example, self.dtypes, roundings=16.0, working_roundings=64.0)
