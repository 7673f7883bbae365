"""Like timm and DINOv2: gated MLPs with a norm and two dropouts, and with both projections in one matrix."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int, norm_layer: type[nn.Module] | None = None, drop: float = 0.1) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(dim, hidden)
        self.fc1_x = nn.Linear(dim, hidden)
        self.act = nn.SiLU()
        self.drop1 = nn.Dropout(drop)
        self.norm = norm_layer(hidden) if norm_layer is not None else nn.Identity()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x_gate = self.fc1_g(x)
        x = self.fc1_x(x)
        x = self.act(x_gate) * x
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class GluMlp(nn.Module):
    def __init__(
        self,
        dim: int,
        hidden: int,
        act_layer: type[nn.Module] = nn.Sigmoid,
        norm_layer: type[nn.Module] | None = None,
        drop: float = 0.1,
        gate_last: bool = True,
    ) -> None:
        super().__init__()
        self.chunk_dim = -1
        self.gate_last = gate_last
        self.fc1 = nn.Linear(dim, hidden)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.norm = norm_layer(hidden // 2) if norm_layer is not None else nn.Identity()
        self.fc2 = nn.Linear(hidden // 2, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x1, x2 = x.chunk(2, dim=self.chunk_dim)
        x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


class SwiGLUFFN(nn.Module):
    def __init__(self, in_features: int, hidden_features: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features)
        self.w3 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        x12 = self.w12(x)
        x1, x2 = x12.chunk(2, dim=-1)
        hidden = F.silu(x1) * x2
        return self.w3(hidden)


class ResidualBlock(nn.Module):
    def __init__(self, dim: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Classifier(nn.Module):
    """The blocks of a vision transformer without their attention, one for each gated MLP."""

    def __init__(self, dim: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.patch_embed = nn.Embedding(64, dim)
        mlps: list[nn.Module] = [
            SwiGLU(dim, hidden),
            SwiGLU(dim, hidden, norm_layer=nn.LayerNorm),
            GluMlp(dim, 2 * hidden, norm_layer=nn.LayerNorm),
            GluMlp(dim, 2 * hidden, act_layer=nn.SiLU, gate_last=False),
            SwiGLUFFN(dim, hidden),
        ]
        self.blocks = nn.Sequential(*[ResidualBlock(dim, mlp) for mlp in mlps])
        self.head = nn.Linear(dim, 64)

    def forward(self, patches: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch_embed(patches)))
