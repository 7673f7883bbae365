"""RMSNorms in plain PyTorch as models write them, one for each variant, to check the kernels of this package on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["specimens"]


class _Norm(nn.Module):
    def __init__(self, width: int = 48, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps


def _unit(wide: Tensor, eps: float) -> Tensor:
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class Llama(_Norm):
    """Scales after the cast."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self.weight * _unit(hidden_states.to(torch.float32), self.eps).to(hidden_states.dtype)


class Weightless(nn.Module):
    """Has no weight."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return _unit(x.float(), self.eps).type_as(x)


class LlamaTwiceCast(_Norm):
    """Casts the input once for the mean square and once for the product."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        mean_square = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight


class CastLast(_Norm):
    """Scales before the cast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return (self.weight * _unit(x.to(torch.float32), self.eps)).to(x.dtype)


class CastLastPow(_Norm):
    """Writes the root as a power."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        mean_square = wide.pow(2).mean(-1, keepdim=True) + self.eps
        return (wide * torch.pow(mean_square, -0.5) * self.weight.float()).type_as(x)


class CastLastDiv(_Norm):
    """Divides by the root."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        root = torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide / root * self.weight.float()).type_as(x)


class SingleWeight(CastLastDiv):
    """Has one number, not trained, as the weight of the whole row: Gemma 3n's form of a norm without a weight."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__(eps=eps)
        del self.weight
        self.register_buffer("weight", torch.tensor(1.0), persistent=False)


class Gemma(_Norm):
    """Has a weight that is an offset from one."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return (_unit(x.float(), self.eps) * (1.0 + self.weight.float())).type_as(x)


class GemmaGrouped(Gemma):
    """The same, but normalises each group of neighbours on its own."""

    def __init__(self, width: int = 48, group_size: int = 16) -> None:
        super().__init__(width)
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        """Normalise groups of the last dimension."""
        groups = x.float().view(*x.shape[:-1], -1, self.group_size)
        return (_unit(groups, self.eps).flatten(-2) * (1.0 + self.weight.float())).type_as(x)


class GemmaOwnOffset(_Norm):
    """Adds one in the weight's own dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return (_unit(x.float(), self.eps) * (1.0 + self.weight).float()).type_as(x)


class GemmaInputScaled(_Norm):
    """Scales before it normalises."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale, then normalise the last dimension."""
        scaled = (x.float() * (1.0 + self.weight).float()).type_as(x)
        return _unit(scaled.float(), self.eps).type_as(x)


class T5(_Norm):
    """Casts to the weight's dtype, and only if that is half."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        mean_square = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(mean_square + self.eps)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class LlamaProduct(_Norm):
    """Writes the square as a product."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        mean_square = torch.mean(wide * wide, dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight


class CastLastProduct(_Norm):
    """The same, but scales before the cast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        mean_square = torch.mean(wide * wide, dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)


class NoUpcastProduct(nn.Module):
    """The same in the dtype of the input throughout, with the epsilon written in the formula."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


class Functional(nn.Module):
    """Calls torch's own function; the module itself holds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return functional.rms_norm(x, (x.size(-1),))


class RoundedRoot(nn.Module):
    """Rounds the factor to the dtype of the input."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class NoUpcast(_Norm):
    """Computes in the dtype of the input throughout."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self.weight * _unit(x, self.eps)


class NoUpcastDiv(_Norm):
    """The same, but divides by the root."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return x / torch.sqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + self.eps) * self.weight


class NoUpcastWeightFirst(_Norm):
    """The same, but scales before it multiplies by the root, which is that of the input alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * self.weight * torch.rsqrt(mean_square + self.eps)


class GateFirst(_Norm):
    """Gates, then normalises groups."""

    def __init__(self, width: int = 48, group_size: int = 16) -> None:
        super().__init__(width, 1e-5)
        self.group_size = group_size

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Multiply by silu of the gate, if there is one, and normalise groups of the last dimension."""
        wide = hidden_states.to(torch.float32)
        if gate is not None:
            wide = wide * functional.silu(gate.to(torch.float32))
        groups = wide.view(*wide.shape[:-1], -1, self.group_size)
        unit = _unit(groups, self.eps).view(*wide.shape)
        return self.weight * unit.to(hidden_states.dtype)


class GateFirstCastLast(_Norm):
    """The same, but scales before the cast, and normalises a given number of groups."""

    def __init__(self, width: int = 48, groups: int = 3) -> None:
        super().__init__(width)
        self.n_groups = groups

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Multiply by silu of the gate, if there is one, and normalise groups of the last dimension."""
        wide = hidden_states.to(torch.float32)
        if gate is not None:
            wide = wide * functional.silu(gate.to(torch.float32))
        groups = wide.view(*wide.shape[:-1], self.n_groups, -1)
        return (self.weight * _unit(groups, self.eps).view(*wide.shape)).to(hidden_states.dtype)


class GatedSilu(_Norm):
    """Normalises, casts, scales, then gates."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Normalise the last dimension and multiply by silu of the gate."""
        y = self.weight * _unit(hidden_states.to(torch.float32), self.eps).to(hidden_states.dtype)
        return (y * functional.silu(gate.to(torch.float32))).to(hidden_states.dtype)


class GatedSigmoid(_Norm):
    """The same, with a sigmoid."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Normalise the last dimension and multiply by the sigmoid of the gate."""
        y = self.weight * _unit(hidden_states.to(torch.float32), self.eps).to(hidden_states.dtype)
        return (y * torch.sigmoid(gate.to(torch.float32))).to(hidden_states.dtype)


class GatedSiluCastLast(_Norm):
    """Normalises, scales, gates, and then casts."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Normalise the last dimension and multiply by silu of the gate."""
        y = self.weight * _unit(hidden_states.to(torch.float32), self.eps)
        return (y * functional.silu(gate.to(torch.float32))).to(hidden_states.dtype)


class GatedSigmoidCastLast(_Norm):
    """The same, with a sigmoid."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Normalise the last dimension and multiply by the sigmoid of the gate."""
        y = self.weight * _unit(hidden_states.to(torch.float32), self.eps)
        return (y * torch.sigmoid(gate.to(torch.float32))).to(hidden_states.dtype)


def specimens() -> list[nn.Module]:
    """One norm for each variant, and more for a few that are written in several ways; widths are odd and even.

    Every other norm is in bfloat16, because a kernel is checked at large sizes in the dtype of its module.
    """
    norms = [
        Llama(),
        Llama(33, 1e-5),
        Weightless(),
        LlamaTwiceCast(),
        CastLast(31),
        CastLastPow(),
        CastLastDiv(),
        Gemma(47),
        GemmaGrouped(),
        GemmaOwnOffset(),
        GemmaInputScaled(),
        T5(),
        RoundedRoot(),
        nn.RMSNorm(40),
        Functional(),
        LlamaProduct(),
        CastLastProduct(),
        NoUpcastProduct(),
        NoUpcast(),
        NoUpcastDiv(),
        NoUpcastWeightFirst(),
        GateFirst(),
        GateFirstCastLast(),
        GatedSilu(),
        GatedSigmoid(),
        GatedSiluCastLast(),
        GatedSigmoidCastLast(),
        SingleWeight(),
    ]
    return [norm.to(torch.bfloat16) if number % 2 else norm for number, norm in enumerate(norms)]
