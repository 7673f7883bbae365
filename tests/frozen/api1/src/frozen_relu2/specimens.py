"""Small modules of every kind that the kernels recognise, and of one that they do not serve."""

import torch
from torch import nn

from .mathematics import soft_cap


class Biased(nn.Module):
    """``weight * relu(x)² + bias``."""

    def __init__(self, width=16):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.bias = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return self.weight * torch.relu(x).square() + self.bias


class Scaled(nn.Module):
    """``weight * relu(x)²``."""

    def __init__(self, width=16):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * torch.relu(x).square()


class Cubed(Scaled):
    """Another power."""

    cubed = True

    def forward(self, x):
        return self.weight * torch.relu(x).pow(3)


class Scores(nn.Module):
    """Scores with a limit."""

    def forward(self, x):
        return soft_cap(x, 50.0)


class Twice(nn.Module):
    """Twice the positive part."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ReLU()

    def double(self, x):
        return 2 * x

    def forward(self, x):
        return self.double(self.inner(x))


class Model(nn.Module):
    """All of them, one after the other."""

    def __init__(self, width=16):
        super().__init__()
        self.scaled, self.biased, self.cubed, self.scores = Scaled(width), Biased(width), Cubed(width), Scores()
        self.twice, self.tail = Twice(), nn.Linear(width, width, bias=False)

    def forward(self, x, labels=None):
        found = self.tail(self.twice(self.scores(self.cubed(self.biased(self.scaled(x))))))
        return found if labels is None else (found, nn.functional.cross_entropy(found, labels))


def specimens():
    """One of each variant."""
    return [Scaled(), Biased()]
