"""Where causal convolutions are found, and what is left alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from fuseplug_causal_conv1d import specimens
from fuseplug_causal_conv1d.specimens import Mixer, ShortConv, causal_conv1d_fn


def fused(report):
    return [(entry.paths, str(entry.target), entry.variant) for entry in report.fused]


def why_not(report):
    return "; ".join(entry.why_not for entry in report.left_alone)


def test_every_specimen_is_recognised(manager):
    expected = ["silu", "silu", "identity", "identity"]
    for module, variant in zip(specimens.specimens(), expected, strict=True):
        assert fused(manager.plan(module).report) == [(("",), "forward:causal_conv1d_fn", variant)]


class ByKeyword(Mixer):
    """Calls the function as Kimi-Linear does."""

    def forward(self, hidden_states):
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        x = self.in_proj(hidden_states).transpose(1, 2)
        return causal_conv1d_fn(x, weight=weight, bias=bias, activation=self.activation)


class Padded(Mixer):
    """A convolution that sees as many later tokens as earlier ones."""

    def __init__(self):
        super().__init__(width=3)
        self.conv1d.padding = (1,)


class WrittenOut(Mixer):
    """Written as in transformers 4.57."""

    def forward(self, hidden_states):
        x = self.in_proj(hidden_states).transpose(1, 2)
        return functional.silu(self.conv1d(x)[..., : x.shape[-1]]).transpose(1, 2)


def shifted(x, weight, bias=None, activation=None):
    """A convolution in which each token sees the one after it."""
    y = causal_conv1d_fn(functional.pad(x, (0, 1)), weight, bias, activation)
    return y[:, :, 1:]


def unactivated(x, weight, bias=None, activation=None):
    """Applies no activation, whichever is asked for."""
    del activation
    return causal_conv1d_fn(x, weight, bias)


class Calling(Mixer):
    def forward(self, hidden_states):
        x = self.in_proj(hidden_states).transpose(1, 2)
        return shifted(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation)


class Unactivated(Mixer):
    def forward(self, hidden_states):
        x = self.in_proj(hidden_states).transpose(1, 2)
        return unactivated(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation)


def test_arguments_by_name_are_put_in_place(manager):
    module, hidden = ByKeyword(bias=True), torch.randn(2, 9, 8)
    before = module(hidden)
    with manager.apply_all(module) as applied:
        assert torch.equal(module(hidden), before)
        assert [count.fused for count in applied.calls()] == [1]


def test_behaviour_decides_which_variant_it_is(manager):
    assert [variant for *_, variant in fused(manager.plan(Unactivated()).report)] == ["identity"]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (WrittenOut(), "its causal convolution is written out"),
        (Calling(), "none of the known variants"),
    ],
)
def test_what_is_left_alone_is_said(manager, module, why):
    report = manager.plan(module).report
    assert not fused(report)
    assert why in why_not(report)


def test_another_activation_than_those_of_the_table_is_left_alone(manager, monkeypatch):
    monkeypatch.setitem(specimens._ACTIVATIONS, "gelu", functional.gelu)
    module = Mixer()
    module.activation = "gelu"
    report = manager.plan(module).report
    assert not fused(report)
    assert "none of the known variants" in why_not(report) or "differs" in why_not(report)


@pytest.mark.parametrize("module", [Padded(), nn.Conv1d(4, 4, 3, groups=4, padding=2), nn.Linear(3, 3)])
def test_nothing_is_said_of_other_modules(manager, module):
    assert not manager.plan(module).report.entries


def packed(hidden_states, weight, bias=None, activation=None, **kwargs):
    if kwargs.get("seq_idx") is not None:
        raise ValueError("packed sequences cannot be kept apart")
    return causal_conv1d_fn(hidden_states, weight, bias, activation)


class Packing(Mixer):
    def forward(self, hidden_states, **kwargs):
        x = self.in_proj(hidden_states).transpose(1, 2)
        return packed(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation=self.activation, **kwargs)


def test_packed_sequences_are_the_originals(manager):
    module, hidden = Packing(), torch.randn(2, 9, 8)
    before = module(hidden)
    with manager.apply_all(module) as applied:
        for kwargs in ({}, {"seq_idx": None}, {"num_items_in_batch": 4}):
            assert torch.equal(module(hidden, **kwargs), before)
        assert [count.fused for count in applied.calls()] == [3]
        with pytest.raises(ValueError, match="cannot be kept apart"):
            module(hidden, seq_idx=torch.zeros(2, 9))


@pytest.mark.parametrize("change", ["activation", "shape", "dtype"])
def test_calls_that_were_not_verified_are_the_originals(manager, monkeypatch, change):
    monkeypatch.setitem(specimens._ACTIVATIONS, "relu", functional.relu)
    module, hidden = Mixer(), torch.randn(2, 9, 8)
    with manager.apply_all(module) as applied:
        if change == "activation":
            module.activation = "relu"
        elif change == "shape":
            hidden = hidden[:0]
        else:
            module, hidden = module.double(), hidden.double()
        found = module(hidden)
        fused_calls = sum(count.fused for count in applied.calls())
    assert torch.equal(found, module(hidden))
    assert fused_calls == 0 or change == "shape"


def test_float32_weights_beside_half_inputs(manager):
    module = ShortConv().to(torch.bfloat16)
    module.conv.float()
    hidden = torch.randn(2, 9, 8, dtype=torch.bfloat16)
    before = module(hidden)
    with manager.apply_all(module) as applied:
        assert torch.equal(module(hidden), before)
        assert [count.fused for count in applied.calls()] == [1]


def test_under_autocast_the_kernel_computes(manager):
    module, hidden = Mixer(), torch.randn(2, 9, 8)
    with manager.apply_all(module) as applied:
        with torch.autocast("cpu", torch.bfloat16):
            module(hidden)
        assert [count.fused for count in applied.calls()] == [1]
