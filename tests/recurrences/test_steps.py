"""Decoding steps by functions that write into the states, and the steps that are left alone."""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from support.managers import manager_of
from support.recurrences import reference_manager

from fuseplug_selective_scan import specimens as of_scans
from fuseplug_selective_scan.kernels import InductorSelectiveScanKernel
from fuseplug_ssd import specimens as of_chunk_scans
from fuseplug_ssd.kernels import InductorSSDKernel

if transformers.__version__ < "5":
    pytest.skip("there steps are written out", allow_module_level=True)

from transformers.models.mamba.modeling_mamba import mamba_selective_state_update
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update


class Family(NamedTuple):
    """One kind of decoding step.

    Attributes:
        kernel: The kernel for CPUs.
        mixer: A specimen that looks up a function for many tokens.
        whole: The function for many tokens.
        update: The function for one token.
        state: The shape of the states. Without its last dimension, it is the shape of x.
        groups: The dimension of groups in B and C, if they have one.
        otherwise: Other arguments with which a model calls ``update``, too.
    """

    kernel: type[Any]
    mixer: type[torch.nn.Module]
    whole: Callable[..., Any]
    update: Callable[..., Any]
    state: tuple[int, ...]
    groups: tuple[int, ...]
    otherwise: dict[str, Any]

    def step(self, dtype=torch.float32, **changes):
        """The arguments of a step by name, including optional ones. The bias of a channel is in float32."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        (batch, *of_x, states), wide = self.state, len(self.state) > 3
        one = (*of_x[:1], 1) if wide else of_x  # one number for each head, or for each channel
        B, C = (normal(batch, *self.groups, states).to(dtype) for _ in range(2))
        return {
            "state": normal(*self.state),
            "hidden_states": normal(batch, *of_x).to(dtype),
            "dt": normal(batch, *one).to(dtype).expand(batch, *of_x),
            "A": -normal(*one, 1 if wide else states).exp().expand(*of_x, states),
            "B": B,
            "C": C,
            "D": normal(*one).to(dtype).expand(of_x),
            "dt_bias": normal(*one).to(dtype if wide else torch.float32).expand(of_x),
            "dt_softplus": True,
            "z": normal(batch, *of_x).to(dtype),
        } | changes

    def decoding(self, update=None):
        """A mixer that looks up the function for many tokens, too, as real mixers do."""
        names = {"whole": self.whole, "update": update or self.update}
        return type("Decoding", (self.mixer,), {"forward": _with_globals(_forward, names)})()

    def wrong(self, function):
        """A mixer whose function for one token is *function*, which can call the right one as ``update``."""
        return self.decoding(_with_globals(function, {"update": self.update}))


def _forward(self, state, *args, **kwargs):
    return whole(*args, **kwargs) if state is None else update(state, *args, **kwargs)  # noqa: F821


def _forward_without_a_scan(self, *args, **kwargs):
    return update(*args, **kwargs)  # noqa: F821


def forgets(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs):
    """Leaves the state as it is."""
    return update(state.clone(), hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)  # noqa: F821


def zeroes(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs):
    result = update(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z)  # noqa: F821
    state.zero_()
    return result


def ungated(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs):
    return update(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus)  # noqa: F821


def _with_globals(function, names):
    """A copy of *function* in its own Python module, where it looks up *names*."""
    module = types.ModuleType(f"{__name__}_{len(MODULES)}")
    MODULES.append(module)
    sys.modules[module.__name__] = module  # where Dynamo looks for it
    vars(module).update(names, __builtins__=builtins)
    return types.FunctionType(function.__code__, vars(module), function.__name__, function.__defaults__)


MODULES = []


FAMILIES = {
    "selective_scan": Family(
        *(
            InductorSelectiveScanKernel,
            of_scans.Mixer,
            of_scans.selective_scan,
            inspect.unwrap(mamba_selective_state_update),
        ),
        *((2, 6, 4), (), {"D": torch.linspace(-1, 1, 6)}),
    ),
    "ssd": Family(
        *(
            InductorSSDKernel,
            of_chunk_scans.Mixer,
            of_chunk_scans.chunk_scan,
            inspect.unwrap(mamba2_selective_state_update),
        ),
        *((2, 6, 3, 4), (2,), {"z": None}),
    ),
}

pytestmark = pytest.mark.usefixtures("small_checks")

every = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.fixture
def manager(family):
    return reference_manager(family.kernel.op)


def stepped(function, arguments, **how):
    """The result of *function*, and the state that it leaves, computed on a copy of the state."""
    state = arguments["state"].clone()
    with torch.set_grad_enabled(how.get("gradients", False)):
        return function(**arguments | {"state": state}), state


def step_counts(applied):
    (count,) = (count for count in applied.calls() if count.target.function == "update")
    return count.fused, count.original


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every
def test_a_step_of_decoding_is_fused_and_writes_its_state(manager, family, dtype):
    module = family.decoding().to(dtype)
    calls = [family.step(dtype), family.step(dtype) | family.otherwise]
    with manager.apply_all(module) as applied:
        for call in calls:
            results, expected = stepped(module, call), stepped(family.update, call)
            torch.testing.assert_close(
                results, expected, rtol=8 * torch.finfo(dtype).eps, atol=0.03 if dtype.itemsize < 4 else 1e-5
            )
            assert [t.stride() for t in results] == [t.stride() for t in expected]
        assert step_counts(applied) == (2, 0), applied.report
        with torch.autocast("cpu", torch.bfloat16):
            stepped(module, calls[0])
        assert step_counts(applied) == (3, 0), applied.report


@every
def test_a_small_step_is_the_originals(family, monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE", raising=False)
    with manager_of(family.kernel).apply_all(module := family.decoding()) as applied:
        assert all(map(torch.equal, stepped(module, family.step()), stepped(family.update, family.step())))
        assert step_counts(applied) == (0, 1)


@every
def test_a_part_of_a_state_is_written_in_place(manager, family):
    module, arguments = family.decoding(), family.step()
    states = torch.randn(family.state[0], 3, *family.state[1:])
    before, part = states.clone(), {"state": states[:, 1]}
    expected = stepped(family.update, arguments | part)[1]
    with manager.apply_all(module) as applied, torch.no_grad():
        module(**arguments | part)
        assert step_counts(applied) == (1, 0)
    torch.testing.assert_close(states[:, 1], expected)
    assert torch.equal(states[:, ::2], before[:, ::2])


@pytest.mark.parametrize(
    ("function", "why"), [(forgets, "args[0] afterwards"), (zeroes, "args[0] afterwards"), (ungated, "output[0]")]
)
@every
def test_a_step_that_computes_something_else_is_left_alone(manager, family, function, why):
    report = manager.plan(family.wrong(function)).report
    assert [entry.target.function for entry in report.fused] == ["whole"]
    assert why in "; ".join(entry.why_not for entry in report.left_alone)


@every
def test_a_step_without_a_scan_beside_it_is_nothing_to_say(manager, family):
    """In the other family, a function of the same signature computes another recurrence."""
    forward = _with_globals(_forward_without_a_scan, {"update": family.update})
    assert not manager.plan(type("OfAnotherFamily", (family.mixer,), {"forward": forward})()).report.entries


@every
def test_steps_that_are_not_the_kernels_are_the_originals(manager, family):
    module, step = family.decoding(), family.step()
    x = step["hidden_states"]
    calls = [
        (step, {"gradients": True}),
        (family.step(hidden_states=x.double()), {}),
        (family.step(state=step["state"].bfloat16()), {}),
    ]
    with manager.apply_all(module) as applied:
        for call, how in calls:
            assert all(map(torch.equal, stepped(module, call, **how), stepped(family.update, call, **how)))
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert all(map(torch.equal, stepped(compiled, step), stepped(family.update, step)))
        assert step_counts(applied)[0] == 0


@pytest.mark.parametrize("name", ["dt", "A", "D", "dt_bias"])
def test_what_differs_within_a_head_is_the_originals(name):
    family = FAMILIES["ssd"]
    module, step = family.decoding(), family.step()
    same = step | {name: step[name].contiguous()}
    other = step | {name: step[name] * torch.rand(step[name].shape)}
    with reference_manager("ssd").apply_all(module) as applied:
        torch.testing.assert_close(stepped(module, same), stepped(family.update, same))
        assert step_counts(applied) == (1, 0)
        assert all(map(torch.equal, stepped(module, other), stepped(family.update, other)))
        assert step_counts(applied) == (1, 1)
