"""Where selective scans are found, and what is left alone."""

import pytest
import torch
from support.recurrences import assert_given_as_asked, assert_left_alone

from fuseplug_selective_scan.specimens import Mixer, selective_scan

HIDDEN = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))


def forgetful(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False, **kwargs
):
    """A scan whose states decay twice as fast."""
    return selective_scan(u, delta, 2 * A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def ungated(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False, **kwargs
):
    return selective_scan(u, delta, A, B, C, D, None, delta_bias, delta_softplus, return_last_state)


class Forgetful(Mixer):
    def forward(self, hidden_states):
        return forgetful(*arguments_of(self, hidden_states)).transpose(1, 2)


class Ungated(Mixer):
    def forward(self, hidden_states):
        return ungated(*arguments_of(self, hidden_states)).transpose(1, 2)


def arguments_of(module, hidden_states):
    x, dt, z = module.in_proj(hidden_states).transpose(1, 2).chunk(3, dim=1)
    B, C = module.x_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
    return x, dt, -torch.exp(module.A_log.float()), B, C, module.D, z, module.dt_bias, True


class WrittenOut(Mixer):
    """Written as in transformers 4.57."""

    def forward(self, hidden_states):
        return self.slow_forward(hidden_states)

    def slow_forward(self, hidden_states):
        return self.in_proj(hidden_states)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Forgetful(), "none of the known variants"),
        (Ungated(), "none of the known variants"),
        (WrittenOut(), "its selective scan is written out in its forward"),
    ],
)
def test_what_is_left_alone_is_said(manager, module, why):
    assert_left_alone(manager, module, why)


class Calling(Mixer):
    """Passes its arguments on to the function."""

    def forward(self, *args, **kwargs):
        return selective_scan(*args, **kwargs)


def test_what_is_asked_for_is_given(manager):
    module = Calling()
    x, dt, A, B, C, D, z, bias, _ = arguments_of(module, HIDDEN)
    gated = {"D": D, "z": z, "delta_bias": bias, "delta_softplus": True}
    hows = [
        gated,
        gated | {"return_last_state": True},
        {"D": D, "seq_idx": None, "num_items_in_batch": 3},
    ]
    assert_given_as_asked(manager, module, (x, dt.abs(), A, B, C), hows)


def test_calls_that_are_not_the_kernels_are_the_originals(manager):
    module = Calling()
    x, dt, A, B, C, D, z, bias, softplus = arguments_of(module, HIDDEN)
    calls = [
        (x[..., :7], dt[..., :7], A, B[..., :7], C[..., :7], D),  # too few tokens
        (x.double(), dt, A, B, C.double(), D, z, bias, softplus),
        (x, dt, A, B[:1], C, D, z, bias, softplus),
        (x, dt[:, :1], A, B, C, D),
        (x, dt.abs(), A, B, C),  # no skip
        (x, dt, A, B, C, D, z, bias, False),  # a bias was not tried without a softplus
    ]
    with manager.apply_all(module) as applied:
        for call in calls:
            assert torch.equal(module(*call), selective_scan(*call))
        with pytest.raises(ValueError, match="cannot be kept apart"):
            module(x, dt, A, B, C, D, z, bias, softplus, seq_idx=torch.zeros(2, 9))
        assert [count.fused for count in applied.calls()] == [0]
