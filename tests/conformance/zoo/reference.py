"""The references: the right results."""

import torch
from torch.nn import functional


def norm(x, weight, eps, offset=0.0):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (unit * (offset + weight.to(wide.dtype))).to(x.dtype)


def gated(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, up = wide.chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


def centred(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    apart = wide - wide.mean(-1, keepdim=True)
    return (apart * torch.rsqrt(apart.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotary(q, k, cos, sin):
    def turned(x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def first_half(x):
    return x[..., : x.shape[-1] // 2].clone()


def norm_of_something(x, weight, eps, offset=0.0):
    """A reference that is right, except for empty inputs."""
    if not x.numel():
        raise ValueError("x is empty")
    return norm(x, weight, eps, offset)


def product(a, b):
    return a * b


def label_loss(x, weight, labels):
    return functional.cross_entropy(functional.linear(x, weight), labels)
