"""What a forward does besides computing still happens: such a module is left alone, and the report says why."""

import pytest
import torch
from support.attacking import fused, numbers
from support.gated import GatedKernel
from support.kernels import ExpertsKernel, NormKernel
from support.models import MLP, Experts, Norm
from torch import nn

LOSSES = []
COUNTS = {"calls": 0}


def noting_attribute(self, y):
    self.last = y


def noting_in_list(self, y):
    LOSSES.append(y.pow(2).mean())


def noting_in_dict(self, y):
    COUNTS["calls"] += 1


def noting_in_buffer(self, y):
    self.total += y.detach().sum().float()


def noting_by_setattr(self, y):
    setattr(self, "last", y)  # noqa: B010


def noting_on_object(self, y):
    self.knob.last = y.detach()


def noting_in_helper(self, y):
    self._note(y)


EFFECTS = {name.removeprefix("noting_"): each for name, each in globals().items() if name.startswith("noting_")}


class Noting:
    """What the forwards below have to note in."""

    def _ready(self):
        self.knob = nn.Identity()
        self.register_buffer("total", torch.zeros(()))
        return self

    def _note(self, y):
        self.last = y


class NotingNorm(Noting, Norm):
    def forward(self, hidden_states):
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        y = self.weight * hidden_states.to(dtype)
        EFFECT(self, y)
        return y


class NotingMLP(Noting, MLP):
    def forward(self, x):
        y = self.down(self.act(self.gate(x)) * self.up(x))
        EFFECT(self, y)
        return y


class NotingExperts(Noting, Experts):
    def forward(self, x):
        y = sum(expert(x) for expert in self.experts)
        EFFECT(self, y)
        return y


def nothing(self, y):
    pass


EFFECT = nothing
MODULES = {
    "norm": (NotingNorm, NormKernel),
    "gated MLP": (NotingMLP, GatedKernel),
    "experts": (NotingExperts, ExpertsKernel),
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_module_that_notes_something_is_left_alone(effect, module, monkeypatch):
    monkeypatch.setitem(globals(), "EFFECT", EFFECTS[effect])
    make, kernel = MODULES[module]
    model = make()._ready()
    (entry,) = [each for each in fused(model, [kernel]).report.entries if each.paths == ("",)]
    assert not entry.fused
    assert "it does more than compute" in entry.why_not, entry.why_not


@pytest.mark.parametrize("module", ["norm", "gated MLP"])
def test_one_that_notes_nothing_is_fused(module, monkeypatch):
    make, kernel = MODULES[module]
    model = make()._ready()
    assert fused(model, [kernel]).report.fused


def test_planning_does_nothing_of_it(monkeypatch):
    monkeypatch.setitem(globals(), "EFFECT", noting_in_list)
    fused(NotingNorm()._ready(), [NormKernel])
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
