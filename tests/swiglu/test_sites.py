"""Every way to write a gated MLP is recognised, and its variant found by what it computes."""

import copy
import functools
import math
import sys
import types

import pytest
import torch
from support.thorough import covering
from torch import nn
from torch.nn import functional

from fuseplug.contract import Rejection, Site
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_swiglu import reference, specimens
from fuseplug_swiglu.kernels import SwiGLUKernel
from fuseplug_swiglu.recognise.adapters import CallChild, CastTo, Drop, Multiply
from fuseplug_swiglu.recognise.structure import match
from fuseplug_swiglu.specimens import activations, mlps
from fuseplug_swiglu.specimens.mlps import HIDDEN, INNER, Separate

pytestmark = pytest.mark.usefixtures("small_checks")


def site(module):
    return Site("layers.0.mlp", module, "cpu")


def proposal_of(module):
    (proposal,) = match(site(module))
    return proposal


def found(manager, module):
    """The adapter that was chosen for *module*, or ``None``."""
    plan = manager.plan(module, verify=False)
    if not plan.patches:
        return None
    (patch,) = plan.patches
    survivors = [a for a in proposal_of(module).adapters if a.variant == patch.variant]
    return next(a for a in survivors if _is_of(patch, a))


def _is_of(patch, adapter):
    """Whether *patch* was made from *adapter*, as the variables of its closure show."""
    held = [cell.cell_contents for cell in patch.function.__closure__]
    code = next(f for f in held if getattr(f, "__qualname__", "").startswith("GatedAdapter"))
    inner = dict(zip(code.__code__.co_freevars, (c.cell_contents for c in code.__closure__), strict=True))
    if "adapter" in inner:
        return inner["adapter"] == adapter
    return (inner["gate_name"], inner["activation"]) == (adapter.gate, adapter.activation)


# What is expected for each specimen: the variant, then whatever else the adapter says.
EXPECTED = {
    "Wide": ["silu wide"],
    "Multiplied": ["silu scaled"],
    "LearnedScale": ["silu"],
    "Sparse": ["gelu_tanh sparse"] * 2,
    "Clamped": ["silu clamp-before"] * 2 + ["silu clamp-after"] * 2,
    "Offset": ["swish clamp-before-offset gate-first"],
    "DropoutBetween": ["gelu_tanh"],
    "DropoutTwice": ["silu gate-second"],
    "DropoutAfter": ["silu"],
    "NormBetween": ["relu2"],
    "NormBefore": ["silu"],
    "DropoutsAndNorm": ["silu"] * 2,
    "WidePath": ["gelu_new"],
    "GateOnly": ["gelu"],
    "GateOnlyInOne": ["gelu gate-second"],
    "InOne": ["silu gate-first", "silu gate-second", "silu interleaved", "silu gate-first", "gelu gate-second"],
    "Separate": ["silu"] * 3
    + ["gelu", "gelu_tanh", "relu", "sigmoid"]
    + ["relu2", "gelu_new", "gelu_fast", "gelu_erf", "quick_gelu", "swish"],
}
SPECIMENS = [
    (module, EXPECTED[name][number])
    for name in EXPECTED
    for number, module in enumerate(m for m in specimens.specimens() if type(m).__name__ == name)
]


def test_every_row_of_every_table_has_a_specimen():
    assert len(SPECIMENS) == len(specimens.specimens())
    words = {word for _, variant in SPECIMENS for word in variant.split()} | {"plain"}
    assert words == {*ACTIVATIONS, *reference.VARIANTS, *reference.LAYOUTS}


@pytest.mark.parametrize(
    ("module", "variant", "training"),
    covering(
        ((*specimen, training) for specimen in SPECIMENS for training in (True, False)),
        by=lambda module, variant, training: [module, training],
    ),
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_each_specimen_is_found_and_computes_what_it_did_bit_for_bit(alone, outcome, module, variant, training):
    module = copy.deepcopy(module).train(training)
    width = next(p.shape[-1] for p in module.parameters() if p.dim() == 2)
    x = 3 * torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
    before = outcome(module, x)
    with alone().apply_all(module, verify=False) as applied:
        assert [entry.variant for entry in applied.report.fused] == [variant], applied.report
        during = outcome(module, x)
    assert before.keys() == during.keys()
    assert all(torch.equal(before[name], during[name]) for name in before)


class TestWhatIsDoneWhere:
    """A factor of 1, an infinite limit and a dropout that drops nothing are found, too."""

    @pytest.mark.parametrize(
        ("module", "expected"),
        [
            (mlps.Multiplied(), {"numbers": (("scale", "gate_multiplier"),), "up_called_first": True}),
            (mlps.Multiplied(), {"after": (Multiply("down_multiplier"),), "between": ()}),
            (mlps.LearnedScale(), {"after": (Multiply("global_scale"),)}),
            (mlps.Sparse(nn.SiLU(), 0.0), {"numbers": (("sparsity", "activation_sparsity"),)}),
            (mlps.Clamped("after", math.inf), {"numbers": (("limit", "limit"),), "form": "clamp-after"}),
            (mlps.Offset(), {"numbers": (("limit", "limit"), ("beta", "alpha"))}),
            (mlps.DropoutAfter(), {"after": (Drop("residual_dropout"),), "between": ()}),
            (mlps.DropoutBetween(), {"between": (CallChild("dropout"),), "after": ()}),
            (mlps.DropoutTwice(), {"between": (CallChild("dropout"),), "after": (CallChild("dropout"),)}),
            (mlps.DropoutTwice(), {"before": (CallChild("layer_norm"),), "layout": "gate-second"}),
            (mlps.NormBetween(), {"between": (CallChild("ffn_sub_norm"),), "before": ()}),
            (mlps.NormBefore(), {"before": (CallChild("proj"), CallChild("post_projection_norm"), CallChild("act1"))}),
            (mlps.WidePath(), {"between": (CallChild("dropout"), CastTo("wo"))}),
            (mlps.GateOnly(), {"gate": "w_0", "up": "w_1", "down": None}),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )
    @pytest.mark.parametrize("drop", [0.1, 0.0])
    def test_each_number_and_step_is_found(self, alone, module, expected, drop):
        for child in module.modules():
            if isinstance(child, nn.Dropout):
                child.p = drop
        if hasattr(module, "residual_dropout"):
            module.residual_dropout = drop
        adapter = found(alone(), module)
        assert {name: getattr(adapter, name) for name in expected} == expected

    @pytest.mark.parametrize(
        ("module", "name", "value"),
        [
            (mlps.Multiplied(), "gate_multiplier", 0.25),
            (mlps.Multiplied(), "down_multiplier", 3.0),
            (mlps.Clamped("before", math.inf), "limit", 0.5),
            (mlps.Clamped("after", 9.0), "limit", 0.5),
            (mlps.Sparse(nn.GELU(), 0.0), "activation_sparsity", 0.7),
            (mlps.Offset(), "alpha", 0.5),
            (mlps.DropoutAfter(), "residual_dropout", 0.5),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
    )
    def test_numbers_are_read_at_each_call(self, alone, outcome, module, name, value):
        x = torch.randn(2, 5, HIDDEN)
        before = outcome(module, x)["output"]
        with alone().apply_all(module, verify=False):
            assert torch.equal(outcome(module, x)["output"], before)
            setattr(module, name, value)
            fused = outcome(module, x)
        eager = outcome(module, x)
        assert not torch.equal(eager["output"], before)
        assert all(torch.equal(eager[key], fused[key]) for key in eager)

    def test_a_path_kept_in_float32_is(self, alone, outcome):
        module = mlps.WidePath().bfloat16()
        module.wo.float()
        x = torch.randn(2, 5, HIDDEN).bfloat16()
        before = outcome(module, x)
        with alone().apply_all(module, verify=False) as applied:
            assert applied.report.fused
            during = outcome(module, x)
        assert before["output"].dtype is torch.float32
        assert all(torch.equal(before[name], during[name]) for name in before)


class Packed(nn.Module):
    """A quantised linear layer: its weight has another shape, and no floating dtype."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.in_features, self.out_features = width_in, width_out
        self.weight = nn.Parameter(torch.randint(-8, 8, (width_out * width_in, 1), dtype=torch.int8), False)

    def forward(self, x):
        return x @ self.weight.view(self.out_features, -1).to(x.dtype).T / 8


class Adapted(nn.Module):
    """A linear layer with LoRA, which draws random numbers."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.base_layer = nn.Linear(width_in, width_out)
        self.lora_A = nn.Linear(width_in, 2, bias=False)
        self.lora_B = nn.Linear(2, width_out, bias=False)
        self.lora_dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout(x)))


class TestProjectionsStayModules:
    @pytest.mark.parametrize("kind", [Packed, Adapted])
    @pytest.mark.parametrize("make", [lambda: Separate(nn.SiLU()), mlps.Multiplied])
    def test_any_kind_of_linear_is_called(self, alone, outcome, kind, make):
        module = make()
        for name in ("gate_proj", "up_proj", "down_proj"):
            old = getattr(module, name)
            setattr(module, name, kind(old.in_features, old.out_features))
        x = torch.randn(2, 5, HIDDEN)
        before = outcome(module, x)
        with alone().apply_all(module, verify=False) as applied:
            assert applied.report.fused
            during = outcome(module, x)
        assert all(torch.equal(before[name], during[name]) for name in before)

    def test_hooks_on_them_run(self, alone):
        module, seen = Separate(nn.SiLU()), []
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(module, name).register_forward_hook(lambda *_, name=name: seen.append(name))
        with alone().apply_all(module, verify=False):
            seen.clear()
            module(torch.randn(3, HIDDEN))
        assert seen == ["gate_proj", "up_proj", "down_proj"]

    def test_one_that_comes_later_is_called(self, alone, outcome):
        module, x = Separate(nn.SiLU()), torch.randn(2, 5, HIDDEN)
        with alone().apply_all(module, verify=False):
            module.gate_proj = Adapted(HIDDEN, INNER)
            fused = outcome(module, x)
        eager = outcome(module, x)
        assert all(torch.equal(eager[name], fused[name]) for name in eager)

    def test_one_that_is_used_without_being_called_is_unlike(self, alone):
        class Uses(Separate):
            def forward(self, x):
                gate = functional.linear(x, self.gate_proj.weight)
                return self.down_proj(self.act_fn(gate) * self.up_proj(x))

        (entry,) = alone().plan(Uses(nn.SiLU())).report.entries
        assert [rejection.kind for _, rejection in entry.rejections] == ["unlike"]


class TwoLinears(nn.Module):
    def __init__(self, act, hidden=HIDDEN, inner=INNER):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.act_fn = act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)))


class Head(nn.Module):
    def __init__(self, width=INNER):
        super().__init__()
        self.dense, self.activation = nn.Linear(HIDDEN, width), nn.Tanh()

    def forward(self, x):
        return self.activation(self.dense(x[:, 0]))


class Attention(nn.Module):
    def __init__(self, projections="qkvo"):
        super().__init__()
        for name in projections:
            setattr(self, f"{name}_proj", nn.Linear(HIDDEN, HIDDEN))
        self.last = "o" in projections

    def forward(self, x, mask=None):
        weights = functional.softmax(self.q_proj(x) @ self.k_proj(x).mT, -1)
        out = weights @ self.v_proj(x)
        return self.o_proj(out) if self.last else out


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 8)
        self.experts = nn.ModuleList(Separate(nn.SiLU()) for _ in range(2))

    def forward(self, x):
        return self.experts[0](x) * self.gate(x)[..., :1]


@pytest.mark.parametrize(
    "module",
    [
        *map(TwoLinears, (nn.ReLU(), nn.GELU(), activations.ReLU2())),
        TwoLinears(nn.GELU(), inner=HIDDEN),
        Head(),
        Head(HIDDEN),
        Attention(),
        Attention("qkv"),
        Router(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_none_of_its_business_is_answered_none(module):
    assert match(site(module)) is None


class Changed(Separate):
    """Is built like a gated MLP, but computes whatever *compute* does."""

    def __init__(self, compute, act=None):
        super().__init__(act or nn.SiLU())
        self.compute = compute

    def forward(self, x):
        return self.down_proj(self.compute(self.act_fn(self.gate_proj(x)), self.up_proj(x)))


@pytest.mark.parametrize(
    "module",
    [
        Changed(lambda gate, up: gate + up),
        Changed(lambda gate, up: gate * up.detach()),
        Changed(lambda gate, up: gate.clamp(max=5.0) * up),
        Changed(lambda gate, up: gate * up * 1.0001),
        Changed(lambda gate, up: gate * up, nn.Mish()),
        Changed(lambda gate, up: gate * up, nn.GELU("none").requires_grad_()).train(False),
    ],
)
def test_what_is_built_like_one_and_behaves_otherwise_is_told_from_it(alone, module):
    report = alone().plan(module).report
    if isinstance(module.act_fn, nn.GELU):
        assert [entry.variant for entry in report.fused] == ["gelu"]
    else:
        assert [rejection.kind for entry in report.entries for _, rejection in entry.rejections] == ["unlike"]


def _zeros(gate, up=None, **how):
    return reference.swiglu(gate, up, **how) * 0


def _swaps(gate, up=None, **how):
    return reference.swiglu(up, gate, **how)


def _is_always_silu(gate, up=None, **how):
    return reference.swiglu(gate, up, **how | {"activation": "silu"})


def _is_always_the_other_gelu(gate, up=None, **how):
    return reference.swiglu(gate, up, **how | {"activation": "gelu_new"})


def _forgets_the_limit(gate, up=None, **how):
    return reference.swiglu(gate, up, **how | {"limit": math.inf})


def _cuts_a_gradient(gate, up=None, **how):
    return reference.swiglu(gate, up.detach() + 0 * up, **how)


@pytest.mark.parametrize(
    ("wrong", "module"),
    [
        (_zeros, Separate(nn.SiLU())),
        (_swaps, mlps.GateOnly()),
        (_is_always_silu, Separate(nn.GELU())),
        (_is_always_the_other_gelu, Separate(nn.GELU("tanh"))),
        (_forgets_the_limit, mlps.Clamped("before", 10.0)),
        (_forgets_the_limit, mlps.Clamped("after", 10.0)),
        (_cuts_a_gradient, Separate(nn.SiLU())),
    ],
)
def test_the_examples_expose_a_wrong_implementation(alone, monkeypatch, wrong, module):
    class Wrong(SwiGLUKernel):
        kernel_id = "wrong_swiglu"
        function = reference = "wrong_swiglu:swiglu"

        def match(self, site):
            if not isinstance(site.module, type(module)):
                return None
            # Only the right adapter: otherwise the adapter that swaps, too, would make up for a swap in the kernel.
            proposal = proposal_of(site.module)
            return [type(proposal)(proposal.target, [right], proposal.example, proposal.mixes[:3])]

    right = found(alone(), module)
    monkeypatch.setitem(sys.modules, "wrong_swiglu", types.SimpleNamespace(swiglu=wrong))
    (entry,) = alone(Wrong).plan(module).report.entries
    assert [rejection.kind for _, rejection in entry.rejections] == ["unlike"]


class TakesTwo(Separate):
    def forward(self, x, residual):
        return residual + super().forward(x)


class WithMore(Separate):
    def __init__(self, more):
        super().__init__(nn.SiLU())
        self.more = more

    def forward(self, x):
        return super().forward(x) + self.more(x)


class WithParameter(Separate):
    def __init__(self):
        super().__init__(nn.SiLU())
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return super().forward(x) * self.scale


class GateAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.cap = nn.Tanh()

    def forward(self, gate, up):
        return self.cap(gate) * up


class Layered(nn.Module):
    """Has one matrix for each of three cases."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, width_out, width_in))

    def forward(self, x, layer=None):
        return x


class WithLayered(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = Layered(HIDDEN, 2 * INNER), Layered(INNER, HIDDEN)

    def forward(self, x, layer=None):
        gate, up = self.fc1(x, layer).chunk(2, dim=-1)
        return self.fc2(functional.silu(gate) * up, layer)


class Mixed(Separate):
    """Multiplies matrices in its own forward, and hides its activation in a list."""

    def __init__(self):
        super().__init__(None)
        self.of_both = [functional.silu]

    def forward(self, x):
        product = self.of_both[0](self.gate_proj(x)) * self.up_proj(x)
        return torch.matmul(torch.eye(product.shape[-2]), self.down_proj(product))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (GateAlone(), "it is called with gate and up"),
        (Mixed(), "its forward multiplies matrices itself, and names no known activation"),
        (WithLayered(), "fc1 and fc2, hold several matrices each"),
        (TakesTwo(nn.SiLU()), "its forward takes 2 tensors"),
        (WithMore(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), "it also calls more, a Sequential"),
        (Separate(nn.PReLU()), "it also calls act_fn, a PReLU"),
        (WithParameter(), "it also uses its parameter scale"),
        (Separate(nn.SiLU()).double(), "gate_proj is torch.float64"),
    ],
    ids=lambda value: "" if isinstance(value, nn.Module) else value,
)
def test_what_cannot_be_served_is_said(module, reason):
    said = match(site(module))
    assert isinstance(said, Rejection)
    assert reason in said.reason


def test_examples_are_repeatable_of_the_size_asked_for_and_small_where_size_does_not_matter():
    proposal = proposal_of(Separate(nn.SiLU(), hidden=4096, inner=11008))
    one, two = (proposal.example(proposal.mixes[0], 64, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one.args[0], two.args[0])
    assert torch.equal(one.children["up_proj"].weight, two.children["up_proj"].weight)
    assert 64 <= one.args[0].numel() < 128
    assert sum(p.numel() for child in one.children.values() for p in child.parameters()) < 1000
    large = proposal.example(proposal.mixes[0], 1 << 13, torch.Generator())
    assert large.children["gate_proj"].out_features == 11008, "what is compiled for the check serves the module"
    assert large.args[0].numel() >= 1 << 13


@pytest.mark.parametrize(("hidden", "inner"), [(16, 16), (32, 16), (16, 32), (7, 14), (1, 2), (2, 1), (1, 1)])
@pytest.mark.parametrize("make", [Separate, lambda act, **widths: mlps.InOne(act, "gate-second", **widths)])
def test_widths_may_coincide(alone, hidden, inner, make):
    module = make(nn.SiLU(), hidden=hidden, inner=inner)
    assert len(alone().plan(module, verify=False).patches) == 1


def test_few_candidates_are_left_to_try():
    for module in specimens.specimens():
        assert len(proposal_of(module).adapters) <= 80
    assert len(proposal_of(Separate(nn.SiLU())).adapters) == 2


def test_the_activation_is_covered_and_what_is_still_called_is_not():
    assert proposal_of(Separate(nn.SiLU())).covers == ("act_fn",)
    assert proposal_of(Separate(functional.silu)).covers == ()
    assert "dropout" not in proposal_of(mlps.DropoutBetween()).covers


@pytest.mark.parametrize("act", [functools.partial(functional.gelu, approximate="tanh"), functional.gelu])
def test_an_activation_may_be_a_function(alone, act):
    (patch,) = alone().plan(Separate(act), verify=False).patches
    assert patch.variant.startswith("gelu")


def test_a_method_of_a_module_that_is_no_child_is_left_alone(alone):
    (entry,) = alone().plan(Separate(nn.GELU().forward), verify=False).report.left_alone
    assert "may do more than compute: self.act_fn(self.gate_proj(x))" in entry.why_not
