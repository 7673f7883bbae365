"""Mappings for transformers' use_kernels: what they contain, what they leave out, and why.

tests/kernelize puts mappings on models with the `kernels` package.
"""

import copy
import inspect
import types

import pytest
import torch
from support import models
from support.kernels import NormKernel, ran, variant_of
from support.managers import manager_of
from torch import nn

from fuseplug import PlanError
from fuseplug_tools.integrations.kernelize import VerifiedLayer, kernel_mapping


class Norm(models.Norm):
    kernel_layer_name = "Norm"


class Shifted(models.GemmaNorm):
    """Another formula with the same layer name."""

    kernel_layer_name = "Norm"


class Cubed(Norm):
    """A formula that no kernel has."""

    def forward(self, hidden_states):
        return self.weight * hidden_states**3


class Unrelated(Norm):
    kernel_layer_name = "Other"

    def forward(self, hidden_states):
        return hidden_states + self.eps * self.weight.tanh()


@pytest.fixture(autouse=True)
def only_our_kernel(monkeypatch):
    monkeypatch.setattr("fuseplug_tools.integrations.kernelize.manager", manager_of(NormKernel))
    ran.clear()


def put_on(model, mapping):
    """Put *mapping* on *model* as `kernelize` does."""
    for module in model.modules():
        if name := getattr(type(module), "kernel_layer_name", None):
            cls = mapping[name]["cpu"].load() if name in mapping else type(module)
            module.forward = types.MethodType(cls.forward, module)


def step(model):
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]


def test_verified_layers_are_called_and_the_results_stay():
    model = nn.Sequential(Norm(), Norm(), Shifted())
    expected = step(model)
    mapping = kernel_mapping(model)
    assert set(mapping) == {"Norm"}
    assert mapping.left_out == {}
    assert len(mapping.report.fused) > 0
    assert torch.equal(step(model)[0], expected[0])  # nothing is changed yet
    ran.clear()
    put_on(model, mapping)
    torch.testing.assert_close(step(model), expected)
    assert ran["norm"] == 3
    put_on(model, {})
    assert all(torch.equal(one, other) for one, other in zip(step(model), expected, strict=True))
    assert ran["norm"] == 3


def test_a_call_that_was_not_verified_is_the_originals():
    model = nn.Sequential(Norm(), Shifted())
    put_on(model, kernel_mapping(model))
    ran.clear()
    x = torch.randn(2, 16, dtype=torch.float64)
    assert torch.equal(model(x), nn.Sequential(Norm(), Shifted())(x))
    assert not ran


def test_a_layer_with_one_module_that_is_not_verified_is_left_out():
    model = nn.Sequential(Norm(), Cubed())
    with pytest.raises(PlanError, match=r"no layer of Sequential can be mapped: Norm: 1 \(Cubed\) was not verified"):
        kernel_mapping(model)
    model = nn.Sequential(Norm(), Unrelated())
    mapping = kernel_mapping(model)
    assert set(mapping) == {"Norm"}
    assert set(mapping.left_out) == {"Other"}
    assert "1 (Unrelated) was not verified" in mapping.left_out["Other"]


def test_what_the_user_skips_is_not_mapped():
    with pytest.raises(PlanError, match=r"1 \(Norm\) was not verified, and transformers replaces all or none"):
        kernel_mapping(nn.Sequential(Norm(), Norm()), skip="1")


def test_a_model_without_layer_names():
    with pytest.raises(PlanError, match=r"no module of Sequential has a kernel_layer_name.*manager\.apply_all"):
        kernel_mapping(nn.Sequential(nn.Linear(2, 2)))


def test_modules_of_other_widths_share_a_layer():
    model = nn.ModuleList([Norm(16), Norm(24)])
    mapping = kernel_mapping(model)
    put_on(model, mapping)
    ran.clear()
    for norm in model:
        norm(torch.randn(2, len(norm.weight)))
    assert ran["norm"] == 2


def test_the_layer_is_what_kernels_asks_for():
    layer = kernel_mapping(nn.Sequential(Norm()))["Norm"]["cpu"].load()
    assert issubclass(layer, nn.Module)
    assert layer.__init__ is nn.Module.__init__
    more = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(nn.Module)}
    assert more == {"can_torch_compile", "has_backward"}
    assert inspect.signature(layer.forward) == inspect.signature(Norm.forward)


def test_a_repository_is_equal_to_its_copy():
    """Mappings are copied deeply, and `kernels` remembers loaded layers by their repository."""
    repository = VerifiedLayer(nn.Identity)
    assert copy.deepcopy(repository) == repository
    assert hash(copy.deepcopy(repository)) == hash(repository)
    assert repository.load() is nn.Identity


def test_compiled_without_a_break(monkeypatch):
    kernel = variant_of(NormKernel, function="support.kernels:quiet_norm")
    monkeypatch.setattr("fuseplug_tools.integrations.kernelize.manager", manager_of(kernel))
    model = nn.Sequential(Norm(), Shifted())
    x = torch.randn(3, 16)
    expected = model(x)
    put_on(model, kernel_mapping(model))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
