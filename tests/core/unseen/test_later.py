"""State that made no difference when the kernel was applied, that the kernel does not read, and that changes later."""

import types

import pytest
import torch
from support.attacking import attacked, changing
from support.gated import GatedKernel
from support.kernels import NormKernel, RotaryKernel, variant_of
from support.models import MLP, Attention, Norm, normal
from torch import nn
from torch.nn import functional as F

TABLE = {"silu": torch.sigmoid}
SCALE = 1.0
LIMIT = None


def finished(y):
    return y


def scaled(y):
    return y * 2


class WithNumber(Norm):
    scale = 1.0

    def forward(self, x):
        return normal(self, x) * self.scale


class WithOwnNumber(WithNumber):
    def __init__(self):
        super().__init__()
        self.scale = 1.0


class WithConfig(Norm):
    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(dropout=0.0, limit=None)

    def forward(self, x):
        y = normal(self, x)
        if self.config.limit is not None:
            y = y.clamp(-self.config.limit, self.config.limit)
        return F.dropout(y, self.config.dropout, training=True)


class WithFlag(Norm):
    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(training=False)

    def forward(self, x):
        return normal(self, x) * (2.0 if self.config.training else 1.0)


class WithBuffer(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return normal(self, x) * self.scale.to(x.dtype)


class WithCorrection(Norm):
    """Has a correction that starts from zeros, as ``e_score_correction_bias`` of DeepSeek's router does."""

    def __init__(self):
        super().__init__()
        self.correction = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return normal(self, x) + self.correction.to(x.dtype)


class WithChild(Norm):
    def __init__(self, child):
        super().__init__()
        self.adapter = child

    def forward(self, x):
        y = normal(self, x)
        return y if self.adapter is None else self.adapter(y)


class WithConstant(Norm):
    def forward(self, x):
        return normal(self, x) * SCALE


class WithFunction(Norm):
    def forward(self, x):
        return finished(normal(self, x))


class WithHelper(Norm):
    def forward(self, x):
        return self._finish(normal(self, x))

    def _finish(self, y):
        return y


class WithStatic(Norm):
    def forward(self, x):
        return self._finish(normal(self, x))

    @staticmethod
    def _finish(y):
        return y


class Scaled(Norm):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return normal(self, x) * self.scale


class Unscaled(Norm):
    def forward(self, x):
        return normal(self, x) * getattr(self, "scale", 1.0)


class WithProperty(Norm):
    _scale = 1.0

    @property
    def scale(self):
        return self._scale

    def forward(self, x):
        return normal(self, x) * self.scale


class Plain(Norm):
    def forward(self, x):
        return normal(self, x)


def setting(name, value):
    return lambda module: setattr(module, name, value)


def on_class(cls, name, value):
    return lambda patch: changing(patch, cls, name, value)


def new_on_class(cls, name, value):
    return lambda patch: lambda module: patch.setattr(cls, name, value, raising=False)


def elsewhere(name, value):
    return lambda patch: changing(patch, globals(), name, value)


NORMS = {
    "a number of the module": (WithOwnNumber, setting("scale", 2.0)),
    "a parameter for a number": (Scaled, setting("scale", nn.Parameter(torch.ones(())))),
    "a number that its class did not have": (Unscaled, new_on_class(Unscaled, "scale", 2.0)),
    "a number of the class, set on the module": (WithNumber, setting("scale", 2.0)),
    "a number of the class": (WithNumber, on_class(WithNumber, "scale", 2.0)),
    "a number of its config": (WithConfig, lambda module: setattr(module.config, "dropout", 0.5)),
    "a limit of its config": (WithConfig, lambda module: setattr(module.config, "limit", 0.5)),
    "a flag of its config": (WithFlag, lambda module: setattr(module.config, "training", True)),
    "another config": (WithConfig, setting("config", types.SimpleNamespace(dropout=0.5, limit=1.0))),
    "an adapter for no child": (lambda: WithChild(None), setting("adapter", nn.Linear(16, 16))),
    "an adapter for an identity": (lambda: WithChild(nn.Identity()), setting("adapter", nn.Linear(16, 16))),
    "a constant of its Python module": (WithConstant, elsewhere("SCALE", 2.0)),
    "a function of its Python module": (WithFunction, elsewhere("finished", scaled)),
    "a method of its class": (WithHelper, on_class(WithHelper, "_finish", lambda self, y: y * 2)),
    "a method on the instance": (WithHelper, setting("_finish", scaled)),
    "a static method": (WithStatic, on_class(WithStatic, "_finish", staticmethod(scaled))),
    "what a property reads": (WithProperty, setting("_scale", 2.0)),
    "a property": (WithProperty, on_class(WithProperty, "scale", 2.0)),
    "the forward of its class": (Plain, on_class(Plain, "forward", lambda self, x: normal(self, x) * 2)),
    "a number that the kernel reads": (Norm, setting("eps", 0.5)),
    "a parameter that the kernel reads": (Norm, setting("weight", nn.Parameter(torch.full((16,), 3.0)))),
    "a weight of another dtype": (Norm, setting("weight", nn.Parameter(torch.full((16,), 3.0, dtype=torch.float64)))),
}


def change_of(given, patch):
    """The change *given*, or the one that *given* makes with *patch*, which undoes it later."""
    return given(patch) if given.__code__.co_varnames[:1] == ("patch",) else given


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_computes_with_what_is_there_now(case, monkeypatch):
    make, change = NORMS[case]
    assert attacked([NormKernel], make, change_of(change, monkeypatch)).last in ("original", "kernel")


def test_the_original_computes_with_a_parameter_in_place_of_a_number_that_the_kernel_reads():
    assert attacked([NormKernel], Norm, setting("eps", nn.Parameter(torch.tensor(0.5)))).last == "original"


LEFT_ALONE = {
    "a scalar buffer": (
        WithBuffer,
        lambda module: module.load_state_dict({**module.state_dict(), "scale": torch.tensor(3.0)}),
    ),
    "a correction from zeros": (WithCorrection, lambda module: module.correction.data.fill_(1.0)),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_a_norm_that_reads_a_tensor_which_the_kernel_does_not_is_left_alone(case):
    make, change = LEFT_ALONE[case]
    assert attacked([NormKernel], make, change).last == "alone"


@pytest.mark.parametrize("case", ["a number of the module", "a constant of its Python module", "a method of its class"])
def test_a_compiled_norm_computes_with_what_is_there_now(case, monkeypatch):
    make, change = NORMS[case]
    attacked([NormKernel], make, change_of(change, monkeypatch), compiled=True)


class Silu(nn.Module):
    def forward(self, x):
        return F.silu(x)


class Holding(nn.Module):
    """A module around a function, like many activations of transformers."""

    def __init__(self):
        super().__init__()
        self.function = F.silu

    def forward(self, x):
        return self.function(x)


class Bound(MLP):
    """A gated MLP that holds its activation as a function."""

    def __init__(self):
        super().__init__()
        self.function = F.silu

    def forward(self, x):
        return self.down(self.function(self.gate(x)) * self.up(x))


class Clamped(MLP):
    limit = float("inf")

    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        if self.limit != float("inf"):
            gate = gate.clamp(max=self.limit)
        return self.down(self.act(gate) * up)


GATED = {
    "another activation": (MLP, setting("act", nn.GELU())),
    "the same activation anew": (MLP, setting("act", nn.SiLU())),
    "an activation's approximation": (
        lambda: MLP(act=nn.GELU()),
        lambda module: setattr(module.act, "approximate", "tanh"),
    ),
    "an activation's own function": (
        lambda: MLP(act=Holding()),
        lambda module: setattr(module.act, "function", F.gelu),
    ),
    "a function on the module": (Bound, setting("function", F.gelu)),
    "an activation of the class": (MLP, new_on_class(MLP, "act", staticmethod(F.relu))),
    "the forward of an activation's class": (
        lambda: MLP(act=Silu()),
        on_class(Silu, "forward", lambda self, x: F.relu(x)),
    ),
    "a limit": (Clamped, setting("limit", 0.01)),
    "a projection with an adapter": (
        MLP,
        lambda module: setattr(module, "gate", nn.Sequential(module.gate, nn.Tanh())),
    ),
    "a projection with a bias": (MLP, lambda module: setattr(module.gate, "bias", nn.Parameter(torch.ones(32)))),
    "a projection in another dtype": (MLP, lambda module: module.double()),
}


@pytest.mark.parametrize("case", GATED)
def test_a_gated_mlp_computes_with_what_is_there_now(case, monkeypatch):
    make, change = GATED[case]
    met = attacked([GatedKernel], make, change_of(change, monkeypatch))
    # A projection in another dtype raises, as it does unfused: nobody computes that call.
    assert met.last in ("original", "kernel", *(["unseen"] if "dtype" in case else [])), met


def rotate(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rotary(q, k, cos, sin):
    return q * cos * SCALE + rotate(q) * sin, k * cos + rotate(k) * sin


class Rotating(Attention):
    def forward(self, x):
        length, size = x.shape[-2:]
        angle = torch.arange(length, dtype=torch.float32)[:, None] * torch.linspace(1, 0.1, size)
        q, k = apply_rotary(self.q(x), self.k(x), angle.cos(), angle.sin())
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ x


class Wide(RotaryKernel):
    """A kernel for `apply_rotary` only."""

    kernel_id = "toy_rotary_wide"
    names = ("apply_rotary",)


FUNCTIONS = {
    "a constant that it looks up": elsewhere("SCALE", 2.0),
    "a function that it calls": elsewhere("rotate", lambda x: x),
    "the function itself": elsewhere("apply_rotary", lambda q, k, cos, sin: (q * cos, k * sin)),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_rotation_computes_with_what_is_there_now(case, monkeypatch):
    met = attacked([variant_of(RotaryKernel)], Rotating, change_of(FUNCTIONS[case], monkeypatch))
    assert met.answers[0] in ("kernel", "original")
    assert met.last != "kernel", met
