"""A plain pre-norm encoder of torch's own parts: nn.RMSNorm with and without a weight, with and without an epsilon."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, nhead: int, dim_feedforward: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.linear1 = nn.Linear(d_model, 2 * dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.dropout = nn.Dropout(0.1)
        self.norm1 = nn.RMSNorm(d_model)
        self.norm2 = nn.RMSNorm(d_model, eps=1e-5, elementwise_affine=False)

    def forward(self, src: Tensor) -> Tensor:
        x = self.norm1(src)
        src = src + self.self_attn(x, x, x, need_weights=False)[0]
        return src + self._feed_forward(self.norm2(src))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(F.glu(self.linear1(x), dim=-1)))


class Encoder(nn.Module):
    def __init__(self, d_model: int = 64, nhead: int = 4, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, d_model)
        self.layers = nn.ModuleList([EncoderLayer(d_model, nhead, 96) for _ in range(num_layers)])
        self.norm = nn.RMSNorm(d_model, eps=1e-6)
        self.head = nn.Linear(d_model, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
