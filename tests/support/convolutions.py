"""A third party's kernel for causal convolutions, which looks up the activation in a registry by its name."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fuseplug import Adapter, BaseKernel, Example, Proposal, Target
from fuseplug_verify import called_functions

from .kernels import ran

ACTIVATIONS = {None: lambda y: y, "silu": F.silu, "gelu": F.gelu}


def conv_reference(x, weight, bias, activation):
    x = F.pad(x, (weight.shape[-1] - 1, 0))
    y = F.conv1d(x, weight[:, None], bias, groups=len(weight))
    return ACTIVATIONS[activation](y)


def fused_conv(x, weight, bias, activation):
    ran["conv"] += 1
    windows = F.pad(x, (weight.shape[-1] - 1, 0)).unfold(-1, weight.shape[-1], 1)
    y = (windows * weight[:, None]).sum(-1)
    y = y if bias is None else y + bias[:, None]
    return y * torch.sigmoid(y) if activation == "silu" else ACTIVATIONS[activation](y)


@dataclass(frozen=True)
class ConvAdapter(Adapter):
    variant: str = "causal"

    def bind(self, compute):
        def conv(hidden_states, weight, bias=None, activation=None, **kwargs):
            return compute(hidden_states, weight, bias, activation)

        return conv


class ConvKernel(BaseKernel):
    kernel_id = "toy_conv"
    op = "toyconv"
    function = "support.convolutions:fused_conv"
    reference = "support.convolutions:conv_reference"
    check_sizes = (512,)
    target = "causal_conv1d_fn"
    keyword: bool = True
    """Whether callers pass the activation by keyword."""
    bias: bool = True
    names: tuple[str | None, ...] = ("silu",)
    """The activations that callers ask for; if empty, callers leave the argument out."""

    def match(self, site):
        return [self.proposal()] if self.target in called_functions(type(site.module).forward) else None

    def proposal(self):
        def example(name, size, generator):
            x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 8, size // 16), (8, 4), (8,)))
            bias = bias if self.bias else None
            if not self.names:
                return Example([x, weight, bias])
            return Example(
                [x, weight, bias, *([] if self.keyword else [name])],
                kwargs={"activation": name} if self.keyword else {},
            )

        target = Target("forward", self.target)
        return Proposal(target, (ConvAdapter(),), example, self.names or (None,), exact=False, roundings=64.0)
