"""Whatever a forward does besides computing still happens: its module is left alone, and the report says why."""

import pytest
import torch
from support.attacking import fused, numbers
from support.gated import GatedKernel
from support.kernels import ExpertsKernel, NormKernel
from support.models import MLP, Experts, Norm, normal
from torch import nn

LOSSES = []


def noted(y):
    LOSSES.append(y)
    return y


class NotingNorm(Norm):
    def forward(self, hidden_states):
        return noted(normal(self, hidden_states))


class NotingMLP(MLP):
    def forward(self, x):
        return noted(self.down(self.act(self.gate(x)) * self.up(x)))


class NotingExperts(Experts):
    def forward(self, x):
        return noted(sum(expert(x) for expert in self.experts))


@pytest.mark.parametrize(
    ("make", "kernel"), [(NotingNorm, NormKernel), (NotingMLP, GatedKernel), (NotingExperts, ExpertsKernel)]
)
def test_a_module_that_notes_something_is_left_alone_and_planning_notes_nothing(make, kernel):
    (entry,) = [each for each in fused(make(), [kernel]).report.entries if each.paths == ("",)]
    assert not entry.fused
    assert "it does more than compute" in entry.why_not, entry.why_not
    assert LOSSES == []


class NotingAct(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * torch.sigmoid(x)


def test_an_effect_of_a_child_counts_too():
    model = MLP(act=NotingAct())
    applied = fused(model, [GatedKernel])
    model(numbers())
    assert model.act.calls == 1
    assert "it does more than compute" in applied.report.left_alone[0].why_not
