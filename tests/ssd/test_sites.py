"""Where chunk scans are found, and what is left alone."""

import pytest
import torch
from support.recurrences import assert_given_as_asked, assert_left_alone

from fuseplug_ssd.recognise.adapters import ChunkScanAdapter
from fuseplug_ssd.specimens import Mixer, chunk_scan

HIDDEN = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))


def forgetful(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    **kwargs,
):
    """A scan whose states decay twice as fast."""
    rest = (D, dt_bias, initial_states, dt_softplus, dt_limit, return_final_states)
    return chunk_scan(x, dt, 2 * A, B, C, chunk_size, *rest)


def unlimited(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    dt_bias=None,
    initial_states=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    **kwargs,
):
    rest = (D, dt_bias, initial_states, dt_softplus, (0.0, float("inf")), return_final_states)
    return chunk_scan(x, dt, A, B, C, chunk_size, *rest)


class Forgetful(Mixer):
    def forward(self, hidden_states):
        return forgetful(*arguments_of(self, hidden_states), dt_softplus=True).flatten(2)


class Unlimited(Mixer):
    def forward(self, hidden_states):
        return unlimited(*arguments_of(self, hidden_states), dt_softplus=True).flatten(2)


def arguments_of(module, hidden_states):
    x, B, C, dt = torch.split(module.in_proj(hidden_states), module.sizes, dim=-1)
    A = -torch.exp(module.A_log.float())
    B, C = (t.unflatten(-1, (module.groups, module.states)) for t in (B, C))
    x = x.unflatten(-1, (module.heads, module.width))
    return x, dt, A, B, C, module.chunk_size, module.D, module.dt_bias


class WrittenOut(Mixer):
    """Written as in transformers 4.57."""

    def forward(self, hidden_states):
        return self.torch_forward(hidden_states)

    def torch_forward(self, hidden_states):
        return self.in_proj(hidden_states)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Forgetful(), "none of the known variants"),
        (Unlimited(), "none of the known variants"),
        (WrittenOut(), "its chunk scan is written out in its forward"),
    ],
)
def test_what_is_left_alone_is_said(manager, module, why):
    assert_left_alone(manager, module, why)


class Calling(Mixer):
    """Passes its arguments on to the function."""

    def forward(self, *args, **kwargs):
        return chunk_scan(*args, **kwargs)


def test_what_is_asked_for_is_given(manager):
    module = Calling()
    state = torch.randn(2, module.heads, module.width, module.states)
    hows = [
        {"dt_softplus": True},
        {"dt_softplus": True, "dt_limit": (0.2, 0.4)},
        {"dt_softplus": True, "return_final_states": True},
        {"dt_softplus": True, "return_final_states": True, "initial_states": state},
    ]
    assert_given_as_asked(manager, module, arguments_of(module, HIDDEN), hows)


def test_calls_that_are_not_the_kernels_are_the_originals(manager):
    module = Calling()
    x, dt, A, B, C, size, D, bias = arguments_of(module, HIDDEN)
    calls = [
        ((x, dt, A, B, C, 3, D, bias), {"dt_softplus": True}),  # a chunk size that was not tried
        ((x.double(), dt, A, B, C, size, D, bias), {"dt_softplus": True}),
        ((x, dt, A, B[:1], C, size, D, bias), {"dt_softplus": True}),
        ((x, dt, A, B, C, size, D, bias), {"dt_softplus": False}),  # a bias was not tried without a softplus
    ]
    with manager.apply_all(module) as applied:
        for args, kwargs in calls:
            assert torch.equal(module(*args, **kwargs), chunk_scan(*args, **kwargs))
        assert [count.fused for count in applied.calls()] == [0]


def test_calls_that_ask_for_more_are_declined():
    def never(*args, **kwargs):
        raise AssertionError

    call = ChunkScanAdapter().bind(never)
    arguments = arguments_of(Mixer(), HIDDEN)
    for name in ("z", "seq_idx", "cu_seqlens"):
        assert call(*arguments, **{name: torch.zeros(2, 9)}) is NotImplemented
