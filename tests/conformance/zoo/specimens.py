"""Modules written as in models."""

import torch
from torch import nn
from torch.nn import functional


class CastLastNorm(nn.Module):
    def __init__(self, size=16, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale()).to(x.dtype)

    def scale(self):
        return self.weight.float()


class OffsetNorm(CastLastNorm):
    def scale(self):
        return 1.0 + self.weight.float()


class SiluAndMul(nn.Module):
    def forward(self, x):
        wide = x.float()
        gate, up = wide.chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(x.dtype)


class Centring(nn.Module):
    def forward(self, x):
        wide = x.float()
        apart = wide - wide.mean(-1, keepdim=True)
        return (apart * torch.rsqrt(apart.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rotary(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary(q, k, cos, sin)


class Projected(nn.Module):
    """Its forward takes other arguments than the function that it looks up."""

    def __init__(self, size=8):
        super().__init__()
        self.qk = nn.Linear(size, 2 * size, bias=False)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.linspace(1, 0.1, x.shape[-1], dtype=x.dtype)
        return apply_rotary(q, k, angle.cos(), angle.sin())


class FirstHalf(nn.Module):
    def forward(self, x):
        return x[..., : x.shape[-1] // 2].clone()


def halves():
    return [FirstHalf()]


def norms():
    return [CastLastNorm(), OffsetNorm(size=15, eps=1e-5)]


def five_norms():
    return [CastLastNorm(size) for size in (16, 8, 12, 24, 20)]


def centring():
    return [Centring()]


def gates():
    return [SiluAndMul()]


def rotaries():
    return [Attention(), Projected()]


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.PReLU(init=0.1)

    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return self.act(gate) * up


def activated():
    return [Activated()]


class Headed(nn.Module):
    """Returns its scores and, with labels, their loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)

    @property
    def dummy_inputs(self):
        return {"x": torch.linspace(-1, 1, 96).view(2, 3, 16), "labels": torch.arange(6)}

    def forward(self, x, labels=None):
        scores = self.scores(self.head(torch.tanh(self.body(x))))
        loss = None if labels is None else functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels)
        return loss, scores

    def scores(self, scores):
        return scores


class Scaled(Headed):
    def scores(self, scores):
        return scores * 0.25


def headed():
    return [Headed(), Scaled()]


class WithoutInputs(Headed):
    dummy_inputs = None


def without_inputs():
    return [WithoutInputs()]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = CastLastNorm()
        self.second = OffsetNorm()

    def forward(self, x):
        return self.second(self.first(x))


def pairs():
    return [Pair()]


class NamedNorm(nn.Module):
    """Takes everything except its main input by name, and ignores unknown names."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x, *, weight, shift=None, centred=False, dtype=None, **_):
        wide = x.float()
        if centred:
            wide = wide - wide.mean(-1, keepdim=True)
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        made = (unit * self.scale(weight)).to(x.dtype)
        if shift is not None:
            made = made + shift
        return made if dtype is None else made.to(dtype)

    def scale(self, weight):
        return weight.float()


class NamedOffsetNorm(NamedNorm):
    def scale(self, weight):
        return 1.0 + weight.float()


def named_norms():
    return [NamedNorm(), NamedOffsetNorm(eps=1e-5)]
