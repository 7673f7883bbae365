"""Where selective scans are found, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from support.managers import manager_of
from support.thorough import first_quick
from torch import nn
from torch.nn import functional

from fuseplug_selective_scan.kernels import InductorSelectiveScanKernel
from fuseplug_selective_scan.specimens import Mixer, selective_scan

HIDDEN = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))


def fused(report):
    return [(entry.paths, str(entry.target), entry.variant) for entry in report.fused]


def why_not(report):
    return "; ".join(entry.why_not for entry in report.left_alone)


def forgetful(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False, **kwargs
):
    """Its states decay twice as fast."""
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
    """As in transformers 4.57."""

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
    report = manager.plan(module).report
    assert not fused(report)
    assert why in why_not(report)


@pytest.mark.parametrize("module", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), nn.Conv1d(4, 4, 3)])
def test_nothing_is_said_of_other_modules(manager, module):
    assert not manager.plan(module).report.entries


class Calling(Mixer):
    """It calls the function as it is called itself."""

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
    expected = [module(x, dt.abs(), A, B, C, **how) for how in hows]
    with manager.apply_all(module) as applied:
        for how, before in zip(hows, expected, strict=True):
            result = module(x, dt.abs(), A, B, C, **how)
            torch.testing.assert_close(result, before, rtol=1e-4, atol=1e-5)
            strides = [[t.stride() for t in ([r] if isinstance(r, torch.Tensor) else r)] for r in (result, before)]
            assert strides[0] == strides[1]
        assert [(count.fused, count.original) for count in applied.calls()] == [(3, 0)]


def test_calls_that_are_not_the_kernels_are_the_originals(manager):
    module = Calling()
    x, dt, A, B, C, D, z, bias, softplus = arguments_of(module, HIDDEN)
    calls = [
        (x[..., :7], dt[..., :7], A, B[..., :7], C[..., :7], D),  # few tokens
        (x.double(), dt, A, B, C.double(), D, z, bias, softplus),
        (x, dt, A, B[:1], C, D, z, bias, softplus),
        (x, dt[:, :1], A, B, C, D),
        (x, dt.abs(), A, B, C),  # no skip
    ]
    with manager.apply_all(module) as applied:
        for call in calls:
            assert torch.equal(module(*call), selective_scan(*call))
        with pytest.raises(ValueError, match="cannot be kept apart"):
            module(x, dt, A, B, C, D, z, bias, softplus, seq_idx=torch.zeros(2, 9))
        assert [count.fused for count in applied.calls()] == [0]


@pytest.mark.parametrize("dtype", first_quick([torch.bfloat16, torch.float16]), ids=str)
def test_modules_in_half_precision(manager, dtype):
    module = Mixer().to(dtype)
    with manager.apply_all(module) as applied:
        module(HIDDEN.to(dtype)).sum().backward()
        assert [(count.fused, count.original) for count in applied.calls()] == [(1, 0)]


def test_a_compiled_call_is_the_originals(manager):
    module = Mixer()
    expected = module(HIDDEN)
    with manager.apply_all(module) as applied:
        found = torch.compile(module, backend="eager", fullgraph=True)(HIDDEN)
        assert [count.fused for count in applied.calls()] == [0]
    assert torch.equal(found, expected)


def update(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs):
    """As Mamba has it: shapes are those of `selective_scan`, without the tokens."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    decays = torch.exp(dt.float()[..., None] * A.float())
    written = dt.float()[..., None] * B.float()[:, None, :] * hidden_states.float()[..., None]
    new = state.float() * decays + written
    state.copy_(new.to(state.dtype))
    result = torch.matmul(new.to(C.dtype), C.unsqueeze(-1)).squeeze(-1)
    if D is not None:
        result = result + hidden_states * D
    if z is not None:
        result = result * functional.silu(z)
    return result.to(hidden_states.dtype)


def forgets(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs):
    """It leaves the state as it is."""
    return update(state.clone(), hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)


def zeroes(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs):
    result = update(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)
    state.zero_()
    return result


class Decoding(Mixer):
    """It looks up a scan as well, as mixers do."""

    def forward(self, state, *args, **kwargs):
        if state is None:
            return selective_scan(*args, **kwargs)
        return update(state, *args, **kwargs)


class Forgetting(Decoding):
    def forward(self, state, *args, **kwargs):
        return selective_scan(*args, **kwargs) if state is None else forgets(state, *args, **kwargs)


class Zeroing(Decoding):
    def forward(self, state, *args, **kwargs):
        return selective_scan(*args, **kwargs) if state is None else zeroes(state, *args, **kwargs)


class OfAnotherFamily(Mixer):
    """Without a scan, as in Mamba2, whose function of this signature computes another recurrence."""

    def forward(self, *args, **kwargs):
        return update(*args, **kwargs)


def step_of(dtype=torch.float32, **changes):
    """The arguments of a step by name, those that may be missing included, in which the weights are in float32."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    x, dt, B, C, z = (normal(2, width).to(dtype) for width in (6, 6, 4, 4, 6))
    return {
        "state": normal(2, 6, 4),
        "hidden_states": x,
        "dt": dt,
        "A": -normal(6, 4).exp(),
        "B": B,
        "C": C,
        "D": normal(6).to(dtype),
        "dt_bias": normal(6),
        "dt_softplus": True,
        "z": z,
    } | changes


def stepped(function, arguments, **how):
    """The result of *function*, and the state that it leaves, of copies."""
    copies = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    with torch.set_grad_enabled(how.get("gradients", False)):
        return function(**copies), copies["state"]


@pytest.mark.parametrize("dtype", first_quick([torch.float32, torch.bfloat16, torch.float16], 2), ids=str)
def test_a_step_of_decoding_is_fused_and_writes_its_state(manager, dtype):
    module = Decoding().to(dtype)
    calls = [step_of(dtype), step_of(dtype, D=step_of()["D"])]
    with manager.apply_all(module) as applied:
        assert [entry[1] for entry in fused(applied.report)][1:] == ["forward:update"], applied.report
        for call in calls:
            found, expected = stepped(module, call), stepped(update, call)
            torch.testing.assert_close(
                found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0.02 if dtype.itemsize < 4 else 1e-6
            )
            assert [t.stride() for t in found] == [t.stride() for t in expected]
        with torch.autocast("cpu", torch.bfloat16):
            stepped(module, calls[0])
        assert (applied.calls()[1].fused, applied.calls()[1].original) == (3, 0)


def test_a_small_step_is_the_originals(monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE", raising=False)
    with manager_of(InductorSelectiveScanKernel).apply_all(module := Decoding()) as applied:
        assert all(map(torch.equal, stepped(module, step_of()), stepped(update, step_of())))
        module(None, *arguments_of(module, HIDDEN))
        assert [(count.fused, count.original) for count in applied.calls()] == [(1, 0), (0, 1)]


def test_a_part_of_a_state_is_written_in_place(manager):
    module, states = Decoding(), torch.randn(2, 3, 6, 4)
    arguments, before = step_of(), states.clone()
    expected = stepped(update, arguments | {"state": states[:, 1]})[1]
    with manager.apply_all(module) as applied, torch.no_grad():
        module(**arguments | {"state": states[:, 1]})
        assert applied.calls()[1].fused == 1
    torch.testing.assert_close(states[:, 1], expected)
    assert torch.equal(states[:, ::2], before[:, ::2])


@pytest.mark.parametrize(("module", "why"), [(Forgetting(), "args[0] afterwards"), (Zeroing(), "args[0] afterwards")])
def test_a_step_that_leaves_another_state_is_left_alone(manager, module, why):
    report = manager.plan(module).report
    assert [entry[1] for entry in fused(report)] == ["forward:selective_scan"]
    assert why in why_not(report)


def test_a_step_without_a_scan_beside_it_is_nothing_to_say(manager):
    assert not manager.plan(OfAnotherFamily()).report.entries


def test_steps_that_are_not_the_kernels_are_the_originals(manager):
    module = Decoding()
    x = step_of()["hidden_states"]
    calls = [
        (step_of(), {"gradients": True}),
        (step_of(hidden_states=x.double()), {}),
        (step_of(hidden_states=x[:1]), {}),  # for all sequences
        (step_of(state=step_of()["state"].bfloat16()), {}),
        (step_of(z=None), {}),
    ]
    with manager.apply_all(module) as applied:
        for call, how in calls:
            assert all(map(torch.equal, stepped(module, call, **how), stepped(update, call, **how)))
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert all(map(torch.equal, stepped(compiled, step_of()), stepped(update, step_of())))
        assert [count.fused for count in applied.calls()] == [0, 0]
