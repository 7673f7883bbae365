"""Liger-Kernel's kernels: as right as ours, in models, too, and without any of the errors that Liger itself has."""

import itertools
import math

import pytest
import torch
from benchmarks.gpu.interpreting import let_peers_in
from support.conformance import check_some
from support.thorough import covering, first_quick, thorough
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from triton.language.extra import libdevice
from triton.runtime import interpreter

from fuseplug import KernelManager
from fuseplug_backends.triton import interpreted
from fuseplug_liger import KERNELS, declines
from fuseplug_linear_cross_entropy.reference import FLOAT, scaled, softcapped
from fuseplug_linear_cross_entropy.reference import linear_cross_entropy as reference_loss
from fuseplug_rmsnorm import reference as norms
from fuseplug_rmsnorm.recognise.adapters import NormAdapter
from fuseplug_rope import reference as rotations
from fuseplug_swiglu import reference as gates

ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
GATES = [{}, {"activation": "gelu_tanh"}, {"activation": "gelu_new"}, {"variant": "scaled", "scale": 0.7}]
OTHER_GATES = [{"activation": "gelu"}, {"activation": "quick_gelu"}, {"variant": "wide"}]
HALVES = [name for name, how in rotations.VARIANTS.items() if how.reads == "halves"]
STEPS = [(FLOAT,), scaled(0.3), softcapped(3.0), ()]


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
    """Leaves Liger's programs as they are, and patches the interpreter so that it can run them."""
    with pytest.MonkeyPatch.context() as patch:
        if interpreted():
            patch.setattr(interpreter, "_implicit_cvt", interpreter._implicit_cvt)
            patch.setattr(interpreter.InterpreterBuilder, "binary_op", interpreter.InterpreterBuilder.binary_op)
            patch.setattr(libdevice, "rsqrt", libdevice.rsqrt)
            patch.setattr(libdevice, "tanh", libdevice.tanh)
            patch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")
            let_peers_in()
        yield


@pytest.fixture
def liger(_interpreted):
    from fuseplug_liger import linear_cross_entropy, rmsnorm, rope, swiglu

    class Modules:
        norm, gate, rotation, loss = rmsnorm, swiglu, rope, linear_cross_entropy

    return Modules


@pytest.fixture
def launches(monkeypatch, liger):
    """The names of Liger's functions that were launched."""
    found = []
    for module in (liger.norm, liger.gate, liger.rotation, liger.loss):

        def launch(function, *args, _inner=module.launch, **options):
            found.append(function.__name__)
            return _inner(function, *args, **options)

        monkeypatch.setattr(module, "launch", launch)
    return found


def normal(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_()


def assert_close(found, expected, dtype):
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        largest = y.detach().double().abs().max().clamp(min=1e-30)
        assert (x.detach().double() - y.detach().double()).abs().max() <= ROUNDING[dtype] * largest


def outcome(function, leaves, seed=9):
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    grads = [normal(*y.shape, dtype=y.dtype, device=y.device, seed=seed).detach() for y in results]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return [*results, *torch.autograd.grad(results, wanted, grads)]


class TestNumbers:
    @pytest.mark.parametrize(("variant", "dtype"), covering(itertools.product(norms.VARIANTS, ROUNDING)))
    def test_norms(self, device, liger, launches, variant, dtype):
        how = norms.VARIANTS[variant]
        leaves = [normal(3, 5, 48, dtype=dtype, device=device), normal(48, dtype=dtype, device=device, seed=1)]
        found = outcome(lambda x, w: liger.norm.rms_norm(x, w, 1e-6, variant=variant), leaves)
        assert_close(found, outcome(lambda x, w: norms.rms_norm(x, w, 1e-6, variant=variant), leaves), dtype)
        declined = declines.of_rmsnorm(NormAdapter(variant, "weight", 1e-6))
        # A variant with a gate is served if a call has no gate.
        assert ("rms_norm_forward" in launches) is (declined is None or how.gate is not None)

    def test_a_norm_of_a_wide_weight_widens(self, device, liger, launches):
        leaves = [normal(3, 48, dtype=torch.bfloat16, device=device), normal(48, device=device, seed=1)]
        found = outcome(lambda x, w: liger.norm.rms_norm(x, w), leaves)
        assert_close(found, outcome(norms.rms_norm, leaves), torch.bfloat16)
        assert found[0].dtype == torch.float32
        assert launches

    @thorough
    def test_norms_of_many_short_rows(self, device, liger):
        leaves = [normal(1 << 15, 16, device=device), normal(16, device=device, seed=1)]
        assert_close(outcome(liger.norm.rms_norm, leaves), outcome(norms.rms_norm, leaves), torch.float32)

    @pytest.mark.parametrize(
        ("how", "layout", "dtype"), covering(itertools.product(GATES, (None, *gates.LAYOUTS), ROUNDING))
    )
    def test_gates(self, device, liger, launches, how, layout, dtype):
        leaves = [normal(2, 3, 40, dtype=dtype, device=device), normal(2, 3, 40, dtype=dtype, device=device, seed=1)]
        if layout is not None:
            leaves, how = leaves[:1], {**how, "layout": layout}
        found = outcome(lambda *x: liger.gate.swiglu(*x, **how), leaves)
        assert_close(found, outcome(lambda *x: gates.swiglu(*x, **how), leaves), dtype)
        assert launches

    @pytest.mark.parametrize("how", OTHER_GATES, ids=str)
    def test_other_gates_are_the_formula(self, device, liger, launches, how):
        leaves = [normal(6, 40, device=device), normal(6, 40, device=device, seed=1)]
        assert torch.equal(liger.gate.swiglu(*leaves, **how), gates.swiglu(*leaves, **how))
        assert launches == []

    @pytest.mark.parametrize(("variant", "dim", "dtype"), covering(itertools.product(HALVES, (1, 2), ROUNDING)))
    def test_rotations(self, device, liger, launches, variant, dim, dtype):
        how = rotations.VARIANTS[variant]
        q, k = normal(2, 5, 3, 16, dtype=dtype, device=device), normal(2, 5, 2, 16, dtype=dtype, device=device, seed=1)
        q, k = (x.detach().transpose(1, 2).requires_grad_() if dim == 1 else x for x in (q, k))
        angles = normal(2, 5, 4 if how.width == "leading" else 8, device=device, seed=2).detach().unsqueeze(dim)
        angles = torch.cat((angles, angles), -1) if how.table == "full" else angles
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        found = outcome(lambda q, k: liger.rotation.rope(q, k, *tables, variant=variant), [q, k])
        expected = outcome(lambda q, k: rotations.rope(q, k, *tables, variant=variant), [q, k])
        assert_close(found, expected, dtype)
        assert [y.stride() for y in found[:2]] == [y.stride() for y in expected[:2]]
        assert launches == ["rope_forward", "rope_backward"]

    @pytest.mark.parametrize(
        ("smoothing", "steps", "reduction", "bias", "dtype"),
        covering(
            row
            for row in itertools.product((0.0, 0.1, None), STEPS, ("mean", "sum", "none"), (False, True), ROUNDING)
            if row[0] is not None or row[2] == "none"
        ),
    )
    def test_losses(self, device, liger, launches, smoothing, steps, reduction, bias, dtype):
        hidden = normal(2, 9, 24, dtype=dtype, device=device)
        weight = (normal(67, 24, device=device, seed=1).detach() / 5).to(dtype).requires_grad_()
        vector = normal(67, dtype=dtype, device=device, seed=2) if bias else None
        labels = (torch.arange(18, device=device).view(2, 9) * 11) % 67
        labels[0, :3] = -100

        def by(function):
            options = {"steps": steps, "reduction": reduction, "label_smoothing": smoothing}
            return outcome(lambda h, w, b: function(h, w, labels, b, **options), [hidden, weight, vector])

        assert_close(by(liger.loss.linear_cross_entropy), by(reference_loss), dtype)
        assert launches


class TestWhatLigerLeavesToItsCallers:
    """Liger 0.8.5 by itself fails each of these."""

    def test_gate_and_up_are_not_written_over(self, device, liger):
        gate, up = normal(4, 40, device=device), normal(4, 40, device=device, seed=1)
        before = gate.detach().clone(), up.detach().clone()
        y = liger.gate.swiglu(gate, up).sum()
        first = torch.autograd.grad(y, (gate, up), retain_graph=True)
        second = torch.autograd.grad(y, (gate, up))
        assert all(map(torch.equal, before, (gate, up)))
        assert all(map(torch.equal, first, second))

    def test_q_and_k_and_their_gradients_are_not_written_over(self, device, liger):
        q, k = (normal(1, 5, 2, 16, device=device, seed=seed).detach().transpose(1, 2) for seed in (0, 1))
        q.requires_grad_(), k.requires_grad_()
        angles = normal(1, 1, 5, 8, device=device, seed=2).detach().repeat(1, 1, 1, 2)
        before = q.detach().clone(), k.detach().clone()
        results = liger.rotation.rope(q, k, angles.cos(), angles.sin())
        grads = [torch.ones(1, 5, 2, 16, device=device).transpose(1, 2) for _ in results]
        torch.autograd.grad(results, (q, k), grads)
        assert all(map(torch.equal, before, (q, k)))
        assert all(bool((grad == 1).all()) for grad in grads)

    @pytest.mark.parametrize("used", [0, 1])
    def test_what_nobody_uses_has_no_gradient(self, device, liger, used):
        pair = [normal(1, 2, 5, 16, device=device, seed=seed) for seed in (1, 2)]
        angles = normal(5, 8, device=device).detach().repeat(1, 2)

        def gradients(rope):
            result = rope(*pair, angles.cos(), angles.sin())[used]
            return torch.autograd.grad(result.square().sum(), pair, allow_unused=True)

        found, expected = gradients(liger.rotation.rope), gradients(rotations.rope)
        assert found[1 - used] is None
        torch.testing.assert_close(found, expected)
        pair[used] = pair[used].detach()
        results = liger.rotation.rope(*pair, angles.cos(), angles.sin())
        assert [y.requires_grad for y in results] == [used == 1, used == 0]

    def test_tables_of_two_halves_that_differ(self, device, liger, launches):
        q = normal(1, 2, 5, 16, device=device)
        cos, sin = (normal(1, 1, 5, 16, device=device, seed=seed).detach() for seed in (1, 2))
        assert torch.equal(liger.rotation.rope(q, q, cos, sin)[0], rotations.rope(q, q, cos, sin)[0])
        assert launches == []
        alike = cos[..., :8].repeat(1, 1, 1, 2)
        liger.rotation.rope(q, q, alike, alike)
        assert launches == ["rope_forward"]
        alike[..., 8:] += 1  # what was found out about `alike` no longer holds
        assert torch.equal(liger.rotation.rope(q, q, alike, alike)[0], rotations.rope(q, q, alike, alike)[0])

    def test_gradients_of_tables(self, device, liger):
        q, angles = normal(1, 2, 5, 16, device=device), normal(1, 1, 5, 8, device=device, seed=1)

        def turned(rope):
            return lambda angles: rope(q, q, angles.cos().repeat(1, 1, 1, 2), angles.sin().repeat(1, 1, 1, 2))

        found, expected = (outcome(turned(rope), [angles]) for rope in (liger.rotation.rope, rotations.rope))
        assert_close(found, expected, torch.float32)

    @pytest.mark.parametrize("what", ["norm", "gate", "rotation", "loss"])
    def test_second_derivatives(self, device, liger, what):
        x, w = normal(3, 16, device=device), normal(16, device=device, seed=1)
        angles = normal(3, 8, device=device, seed=2).detach().repeat(1, 2)
        labels = torch.tensor([1, 2, 0], device=device)
        theirs, reference = {
            "norm": (liger.norm.rms_norm, norms.rms_norm),
            "gate": (lambda x, w: liger.gate.swiglu(x, x * w), lambda x, w: gates.swiglu(x, x * w)),
            "rotation": tuple(
                lambda x, w, rope=rope: rope((x * w)[None, None], x[None, None], angles.cos(), angles.sin())[0] ** 2
                for rope in (liger.rotation.rope, rotations.rope)
            ),
            "loss": (
                lambda x, w: liger.loss.linear_cross_entropy(x, w.view(4, 4).repeat(1, 4), labels),
                lambda x, w: reference_loss(x, w.view(4, 4).repeat(1, 4), labels),
            ),
        }[what]

        def penalty(function):
            (first,) = torch.autograd.grad(function(x, w).sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), (x, w))

        assert_close(penalty(theirs), penalty(reference), torch.float32)

    def test_results_may_be_written_into(self, device, liger):
        x = normal(2, 3, 16, device=device)
        liger.norm.rms_norm(x, None).mul_(2)
        liger.gate.swiglu(x, x).mul_(2)

    def test_a_mean_over_no_label_is_nan(self, device, liger):
        hidden, weight = normal(4, 8, device=device), normal(9, 8, device=device, seed=1)
        ignored = torch.full((4,), -100, device=device)
        loss = liger.loss.linear_cross_entropy(hidden, weight, ignored)
        assert math.isnan(loss)
        assert all(bool((grad == 0).all()) for grad in torch.autograd.grad(loss, (hidden, weight)))

    def test_a_label_that_is_no_word(self, device, liger, launches):
        hidden, weight = normal(4, 8), normal(9, 8, seed=1)
        with pytest.raises(IndexError):
            liger.loss.linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 9, 3]))
        assert launches == []

    def test_a_head_is_trained_alone(self, device, liger):
        hidden, weight = normal(4, 8, device=device).detach(), normal(9, 8, device=device, seed=1)
        labels = torch.tensor([1, 2, 8, 3], device=device)
        found, expected = (
            torch.autograd.grad(function(hidden, weight, labels), weight)
            for function in (liger.loss.linear_cross_entropy, reference_loss)
        )
        assert_close(found, expected, torch.float32)

    def test_a_loss_is_differentiated_twice_over(self, device, liger):
        hidden, weight = normal(4, 8, device=device), normal(9, 8, device=device, seed=1)
        loss = 3 * liger.loss.linear_cross_entropy(hidden, weight, torch.tensor([1, 2, 8, 3], device=device))
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(loss, (hidden, weight))))


TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def tiny(model_type, device, **others):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**TINY, **others})
    return AutoModelForCausalLM.from_config(config).to(device).eval()


def step(model, device):
    model.zero_grad()
    ids = torch.arange(14, device=device).view(2, 7) * 5 % 96
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize(
    ("model_type", "verify"),
    # Each kernel's own check takes the interpreter long. The comparison below is the quick part.
    first_quick([("gemma2", False), ("gemma2", True), ("llama", True), ("qwen3", True), ("phi3", True)]),
)
def test_a_model(device, model_type, verify):
    model = tiny(model_type, device, num_hidden_layers=2 if verify else 1)
    before = step(model, device)
    applied = KernelManager(environ={}).apply_all(model, include=KERNELS, allow=["lazy_logits"], verify=verify)
    assert {entry.kernel_id for entry in applied.report.fused} == set(KERNELS), applied.report
    assert applied.report.left_alone == []
    found = step(model, device)
    assert all(calls.fused and not calls.original for calls in applied.calls())
    for name, true in before.items():
        assert (found[name] - true).abs().max() <= 2e-5 * true.abs().max(), name
    applied.undo()
    again = step(model, device)
    assert all(torch.equal(again[name], true) for name, true in before.items())


class TestDeclined:
    @pytest.mark.parametrize(
        ("model_type", "others", "reason"),
        [
            ("llama", {"hidden_act": "gelu"}, "the exact gelu"),
            ("llama", {"hidden_act": "relu"}, "no relu"),
            ("cohere", {}, "pairs of neighbours"),
        ],
    )
    def test_with_the_reason(self, device, model_type, others, reason):
        model = tiny(model_type, device, **others)
        report = KernelManager(environ={}).plan(model, include=KERNELS, verify=False).report
        assert any(reason in entry.why_not for entry in report.left_alone), report

    def test_what_is_declined_is_served_by_another(self, device):
        model = tiny("llama", device, hidden_act="gelu", num_hidden_layers=1)
        ids = [*KERNELS, "triton_fused_swiglu"]
        report = KernelManager(environ={}).plan(model, include=ids, only="*.mlp", verify=False).report
        (entry,) = report.fused
        assert entry.kernel_id == "triton_fused_swiglu"
        assert "the exact gelu" in dict(entry.rejections)["liger_fused_swiglu"].reason


class TestWhoComesFirst:
    def chosen(self, device, **options):
        norm = nn.RMSNorm(16, eps=1e-6).to(device)
        report = KernelManager(environ=options.pop("environ", {})).plan(norm, verify=False, **options).report
        return [entry.kernel_id for entry in report.fused]

    def test_ours_where_nobody_chooses(self, device):
        assert self.chosen(device) == ["triton_fused_rmsnorm"]

    def test_liger_where_somebody_does(self, device):
        assert self.chosen(device, include=KERNELS) == ["liger_fused_rmsnorm"]
        assert self.chosen(device, include=["liger_fused_rmsnorm", "triton_fused_rmsnorm"]) == ["liger_fused_rmsnorm"]
        assert self.chosen(device, environ={"FUSEPLUG_KERNELS": "-triton_fused_rmsnorm"}) == ["liger_fused_rmsnorm"]
        assert self.chosen(device, exclude="triton_fused_rmsnorm") == ["liger_fused_rmsnorm"]


@thorough
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("kernel_id", KERNELS)
def test_the_kernel_passes(device, kernel_id):
    assert check_some(kernel_id, None).device == device
    assert check_some(kernel_id, 12).device == device
