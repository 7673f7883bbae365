"""Where gated delta rules are found, and what is left alone."""

import pytest
import torch
from support.recurrences import assert_left_alone

from fuseplug_gated_delta_rule.specimens import GatedDeltaNet, chunk_gated_delta_rule

HIDDEN = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))


def forgetful(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False, **kwargs):
    """A rule whose states decay twice as fast."""
    return chunk_gated_delta_rule(
        query, key, value, 2 * g, beta, chunk_size, initial_state, output_final_state, **kwargs
    )


def unscaled(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False, **kwargs):
    y, state = chunk_gated_delta_rule(
        query, key, value, g, beta, chunk_size, initial_state, output_final_state, **kwargs
    )
    return 2 * y, state


class Forgetful(GatedDeltaNet):
    def forward(self, hidden_states):
        q, k, v, g, beta = self.project(hidden_states)
        return forgetful(q, k, v, g=g, beta=beta)[0]


class Unscaled(GatedDeltaNet):
    def forward(self, hidden_states):
        q, k, v, g, beta = self.project(hidden_states)
        return unscaled(q, k, v, g=g, beta=beta)[0]


class OfTheModule(GatedDeltaNet):
    """Written as in transformers 4.57."""

    def __init__(self):
        super().__init__()
        self.chunk_gated_delta_rule = chunk_gated_delta_rule

    def forward(self, hidden_states):
        q, k, v, g, beta = self.project(hidden_states)
        return self.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Forgetful(), "none of the known variants"),
        (Unscaled(), "none of the known variants"),
        (OfTheModule(), "its gated delta rule is an attribute of the module"),
    ],
)
def test_what_is_left_alone_is_said(manager, module, why):
    assert_left_alone(manager, module, why)


class Calling(GatedDeltaNet):
    """Passes its arguments on to the function."""

    def forward(self, *args, **kwargs):
        return chunk_gated_delta_rule(*args, **kwargs)


def test_what_is_asked_for_is_given(manager):
    module, state = Calling(), torch.randn(2, 2, 4, 4)
    arguments = [t.detach() for t in module.project(HIDDEN)]
    hows = [
        {},
        {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True},
        {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": None, "num_items_in_batch": 3},
    ]
    expected = [module(*arguments, **how) for how in hows]
    with manager.apply_all(module) as applied:
        for how, before in zip(hows, expected, strict=True):
            torch.testing.assert_close(module(*arguments, **how), before, rtol=1e-4, atol=1e-5)
        assert [(count.fused, count.original) for count in applied.calls()] == [(3, 0)]


def test_calls_that_were_not_verified_are_the_originals(manager):
    module = Calling()
    q, k, v, g, beta = (t.detach() for t in module.project(HIDDEN))
    with manager.apply_all(module) as applied:
        for arguments, how in (
            ((q, k, v, g, beta, 32), {}),
            ((q, k, v, g, beta), {"chunk_size": 32}),
            ((q, k, v, g[..., :1], beta), {}),
            ((q, k, v, g, beta), {"output_final_state": True}),  # each tried, but not without use_qk_l2norm_in_kernel
            ((q.double(), k, v, g, beta), {}),
        ):
            expected = chunk_gated_delta_rule(*arguments, **how)
            assert torch.equal(module(*arguments, **how)[0], expected[0])
        with pytest.raises(ValueError, match="cannot be kept apart"):
            module(q, k, v, g, beta, cu_seqlens=torch.tensor([0, 9]))
        assert [count.fused for count in applied.calls()] == [0]
