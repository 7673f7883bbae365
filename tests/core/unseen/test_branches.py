"""Branches that no example takes, for other shapes, magnitudes or surroundings: the numbers are the original's."""

from dataclasses import replace

import pytest
import torch
from support.attacking import attacked, numbers
from support.gated import GatedKernel
from support.kernels import GateKernel, NormKernel
from support.models import MLP, Norm, normal
from torch import nn
from torch.nn import functional as F


class ChannelsFirst(Norm):
    def forward(self, x):
        if x.dim() == 4:
            return normal(self, x.movedim(1, -1)).movedim(-1, 1)
        return normal(self, x)


class FiveDimensions(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y * 2 if x.ndim > 4 else y


class Length(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y * 1.5 if x.shape[-2] > 64 else y


class OneToken(Norm):
    def forward(self, x):
        if x.shape[-2] == 1:
            return normal(self, x) * 2
        return normal(self, x)


class OneSequence(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y * 2 if x.shape[0] == 1 else y


class Capacity(Norm):
    capacity = 64

    def forward(self, x):
        y = normal(self, x)
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > self.capacity:
            kept = (torch.arange(len(rows)) < self.capacity).to(y.dtype)
            y = y * kept.reshape(*x.shape[:-1], 1)
        return y


class Window(Norm):
    window = 200

    def forward(self, x):
        y = normal(self, x)
        return torch.cat([y[..., : -self.window, :] * 2, y[..., -self.window :, :]], -2)


class NumberedWindow(Norm):
    def forward(self, x):
        y = normal(self, x)
        return torch.cat([y[..., :-200, :] * 2, y[..., -200:, :]], -2)


class Factor(Norm):
    def forward(self, x):
        return normal(self, x) * (1 + x.shape[-2] // 1000)


class Elements(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y * 2 if x.numel() > 1 << 18 else y


class Multiple(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y * 2 if x.shape[-2] % 97 == 0 else y


class Table(Norm):
    def forward(self, x):
        return normal(self, x) * {1001: 2.0}.get(x.shape[-2], 1.0)


class Repeated(Norm):
    def forward(self, x):
        y = normal(self, x)
        for _ in range(x.shape[-2] // 900):
            y = y * 2
        return y


class Empty(Norm):
    def forward(self, x):
        return x if x.numel() == 0 else normal(self, x)


SHAPES = {
    "channels first in four dimensions": (ChannelsFirst, (2, 16, 3, 16)),
    "five dimensions": (FiveDimensions, (1, 2, 1, 2, 16)),
    "longer than a number in the code": (Length, (70, 16)),
    "longer, in three dimensions": (Length, (2, 70, 16)),
    "one token": (OneToken, (2, 1, 16)),
    "one sequence": (OneSequence, (1, 5, 16)),
    "more rows than a capacity": (Capacity, (70, 16)),
    "longer than a window": (Window, (300, 16)),
    "longer than a window in the code": (NumberedWindow, (300, 16)),
    "a factor by length": (Factor, (1001, 16)),
    "more than 2^18 elements": (Elements, (17000, 16)),
    "a multiple": (Multiple, (194, 16)),
    "a table of lengths": (Table, (1001, 16)),
    "as often as it is long": (Repeated, (1001, 16)),
    "no elements": (Empty, (0, 16)),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_norm_that_looks_at_shapes_gives_its_own_numbers(case):
    make, shape = SHAPES[case]
    given = [[numbers(shape)], [numbers((5, 16))]]
    assert attacked([NormKernel], make, given=given).answers[0] != "kernel"


@pytest.mark.parametrize(
    "shape", [(16,), (1, 16), (5, 16), (2, 130, 16), (1, 1, 16), (2, 3, 4, 16), (1, 2, 1, 2, 16), (0, 16)]
)
def test_a_norm_that_does_not_is_fused_for_every_shape(shape):
    assert attacked([NormKernel], Norm, given=[[numbers(shape)]]).last == "kernel"


class Chunked(MLP):
    """Computes long two-dimensional inputs, such as a router gives, in halves that are wrong on purpose."""

    def forward(self, x):
        if x.dim() == 2 and len(x) > 64:
            return torch.cat([self.one(half) * 2 for half in x.chunk(2)])
        return self.one(x)

    def one(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_a_gated_mlp_that_chunks_gives_its_own_numbers():
    assert attacked([GatedKernel], Chunked, given=[[numbers((70, 16))]]).last != "kernel"


def apply_gate(x, gate):
    if x.dim() == 5:
        return x.sum(0) * torch.sigmoid(gate)
    return x * torch.sigmoid(gate)


class Gating(nn.Module):
    def forward(self, x):
        return apply_gate(x, x)


def test_a_function_that_looks_at_the_rank_gives_its_own_numbers():
    assert attacked([GateKernel], Gating, given=[[numbers((1, 2, 1, 2, 16))]]).last != "kernel"


class Clamped(Norm):
    def forward(self, x):
        return normal(self, x.clamp(-1000, 1000))


class Bounded(Norm):
    def forward(self, x):
        return normal(self, torch.nan_to_num(x))


class Rescaled(Norm):
    def forward(self, x):
        if x.abs().max() > 1000:
            return normal(self, x) * 2
        return normal(self, x)


class Masked(Norm):
    def forward(self, x):
        return normal(self, torch.where(x > 1e6, torch.zeros_like(x), x))


class Beyond(Norm):
    def forward(self, x):
        return normal(self, x) + torch.tanh(F.softplus(x.double() - 1e9)).to(x.dtype)


class Zeros(Norm):
    def forward(self, x):
        return normal(self, x.masked_fill(x == 0, 1.0))


class Tiny(Norm):
    def forward(self, x):
        return normal(self, torch.where(x.abs() < 1e-20, torch.ones_like(x), x))


class NothingAtAll(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y if x.any() else y + 1


class NegativeZero(Norm):
    def forward(self, x):
        return normal(self, x) + torch.signbit(x) * (x == 0)


class ClampedGate(MLP):
    def forward(self, x):
        return self.down(self.act(self.gate(x).clamp(max=1e4)) * self.up(x))


def with_special(value):
    x = numbers((5, 16))
    x[0, 0] = value
    return x


MAGNITUDES = {
    "a clamp": (NormKernel, Clamped, numbers((5, 16), scale=1e4)),
    "nan_to_num, nan": (NormKernel, Bounded, with_special(torch.nan)),
    "nan_to_num, inf": (NormKernel, Bounded, with_special(torch.inf)),
    "a condition on the largest": (NormKernel, Rescaled, numbers((5, 16), scale=1e4)),
    "a mask": (NormKernel, Masked, numbers((5, 16), scale=1e7)),
    "a bend beyond a number": (NormKernel, Beyond, numbers((5, 16), scale=1e10)),
    "zeros": (NormKernel, Zeros, with_special(0.0)),
    "tiny numbers": (NormKernel, Tiny, with_special(1e-25)),
    "nothing but zeros": (NormKernel, NothingAtAll, torch.zeros(5, 16)),
    "a negative zero": (NormKernel, NegativeZero, with_special(-0.0)),
    "a clamp between projections": (GatedKernel, ClampedGate, numbers((5, 16), scale=1e6)),
}


@pytest.mark.parametrize("case", MAGNITUDES)
def test_what_looks_at_magnitudes_gives_its_own_numbers(case):
    kernel, make, x = MAGNITUDES[case]
    assert attacked([kernel], make, given=[[x]]).last != "kernel"


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_plain_norm_is_fused_for_every_magnitude(scale):
    assert attacked([NormKernel], Norm, given=[[numbers(scale=scale)]]).last == "kernel"


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


class AskingAutocast(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y * 2 if torch.is_autocast_enabled("cpu") else y


class WithoutAutocast(MLP):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            return F.linear(self.act(self.gate(x)) * self.up(x), self.down.weight)


class UnderAutocast(MLP):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.down(self.act(self.gate(x)) * self.up(x))


class DecoratedAgainstAutocast(MLP):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


AUTOCAST = {
    "asked": (NormKernel, AskingAutocast),
    "turned off": (GatedKernel, WithoutAutocast),
    "turned on": (GatedKernel, UnderAutocast),
    "turned off by a decorator": (GatedKernel, DecoratedAgainstAutocast),
    "nothing, a norm": (NormKernel, Norm),
    "nothing, a gated MLP": (GatedKernel, MLP),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", AUTOCAST)
def test_numbers_and_dtypes_are_the_originals_under_autocast(case, dtype):
    kernel, make = AUTOCAST[case]
    attacked([kernel], make, given=[[numbers(dtype=dtype)]], around=autocast, share=2e-2)


@pytest.mark.parametrize("case", AUTOCAST)
def test_they_are_without(case):
    kernel, make = AUTOCAST[case]
    attacked([kernel], make)


class Skips(Norm):
    def forward(self, x):
        if x.shape[-1] == 1017:
            return x
        return normal(self, x)


class SkipsOnValue(Norm):
    def forward(self, x):
        y = normal(self, x)
        return y * 2 if y.sum() == 12345 else y


class NeverSo(NormKernel):
    """Declares that no input makes a certain condition true."""

    def match(self, site):
        return [replace(each, impossible=("y.sum() == 12345",)) for each in super().match(site) or []]


@pytest.mark.parametrize(("norm", "fused"), [(SkipsOnValue, True), (Skips, False)])
def test_a_kernel_may_say_that_no_input_takes_a_branch(norm, fused):
    met = attacked([NeverSo], norm, given=[[numbers()]])
    assert met.last == ("kernel" if fused else "alone"), met
    assert fused or "a branch that no example takes both ways" in met.alone
