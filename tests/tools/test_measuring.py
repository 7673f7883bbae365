"""``measure=`` times a kernel in a model to find out from which size on it gains there.

The slow kernels here sleep for far longer than the originals compute, so that no verdict is a matter of chance.
"""

import json
import time
from dataclasses import replace

import pytest
import torch
from support import heads
from support.heads import FreeSumKernel
from support.kernels import (
    ExpertsKernel,
    GateKernel,
    NormKernel,
    RotaryKernel,
    experts_reference,
    quiet_norm,
    ran,
    variant_of,
)
from support.managers import manager_of
from support.models import Attention, Experts
from torch import nn

from fuseplug import PlanError, Target
from fuseplug.cli import main
from fuseplug.cli.from_config import config_of_type, model_of
from fuseplug.patching.gains import EVERY_SIZE, NEVER, Ends, Gains
from fuseplug_tools.measuring import batches_of, runs_of, timing
from fuseplug_tools.measuring.figures import Figure, Timing, measured

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
SLEEP = 0.02
SMALL = 256


@pytest.fixture(autouse=True)
def _as_users_call(monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
    monkeypatch.setattr(timing, "SECONDS", 0.05)


@pytest.fixture
def timed(monkeypatch):
    """A list of the timed calls: the shape of the main input, and whether the backward is timed, too."""
    found = []
    by_turns = timing.by_turns

    def counted(runs, *args, **kwargs):
        _, call, leaves = runs["kernel"].args
        found.append((tuple(call.args[1].shape), bool(leaves)))
        return by_turns(runs, *args, **kwargs)

    monkeypatch.setattr(timing, "by_turns", counted)
    return found


class LongNorm(nn.Module):
    """A norm that takes about a hundred times as long as necessary."""

    def __init__(self, size=8):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.eps = 1e-6

    def forward(self, x):
        wide = x.float()
        for _ in range(100):
            wide = wide.neg().neg()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.norms = nn.ModuleList([LongNorm(size) for size in sizes or (8,)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, uses=None):
        self.calls += 1
        for norm in self.norms[:uses]:
            x = torch.nn.functional.dropout(norm(x[..., : norm.weight.shape[0]]), 0.1)
        return x


def slow_if_small(x, *args):
    ran["small"] += 1
    if x.numel() < SMALL:
        time.sleep(SLEEP)
    return quiet_norm(x, *args)


def slow(x, *args):
    if torch.is_grad_enabled() or x.numel():
        time.sleep(SLEEP)
    return quiet_norm(x, *args)


def slow_in_training(x, *args):
    if torch.is_grad_enabled() and x.requires_grad:
        time.sleep(SLEEP)
    return quiet_norm(x, *args)


def slow_experts(x, weights, epsilons):
    time.sleep(SLEEP)
    return experts_reference(x, weights, epsilons)


def apply_gate(x, gate):
    """Computes the same as `GateKernel`, as slowly as `LongNorm`."""
    for _ in range(100):
        gate = gate.neg().neg()
    return x * torch.sigmoid(gate)


class Gated(nn.Module):
    def forward(self, x):
        return apply_gate(x, x)


def fails_if_large(x, *args):
    if x.numel() > 1 << 14:
        raise RuntimeError("no room")
    return quiet_norm(x, *args)


def kernel(function, declared=0, **more):
    function = function if isinstance(function, str) else f"{__name__}:{function.__name__}"
    return variant_of(NormKernel, function=function, gains_from=lambda self, use: declared, check_sizes=(512,), **more)


QUICK = "support.kernels:quiet_norm"


def batch(rows, size=8):
    return {"x": torch.randn(rows, size)}


def plan(*kernels, model=None, measure=(), **options):
    return manager_of(*kernels).plan(model or Model(), measure=measure or [batch(8), batch(64)], **options)


class TestFromWhichSize:
    @pytest.mark.parametrize(("declared", "found"), [(10, 10), (1000, 64)], ids=["declared less", "declared more"])
    def test_a_kernel_that_gains_everywhere_is_used_from_the_smallest_size_or_what_it_declares(self, declared, found):
        (entry,) = plan(kernel(QUICK, declared)).report.fused
        assert entry.gains_from["float32 training"] == entry.gains_from["float32 inference"] == found
        assert entry.gains_from["bfloat16 training"] == declared
        assert [figure.shape for figure in entry.figures] == [(8, 8), (64, 8)]
        assert all(each.gain > 1 for figure in entry.figures for each in (figure.forward, figure.both))

    def test_one_that_gains_only_above_some_size_is_used_from_there(self):
        model = Model()
        applied = manager_of(kernel(slow_if_small)).apply_all(model, measure=[batch(64), batch(8)])
        (entry,) = applied.report.fused
        assert entry.gains_from["float32 training"] == entry.gains_from["float32 inference"] == 512
        ran.clear()
        model(**batch(63))
        assert ran["small"] == 0
        model(**batch(64))
        assert ran["small"] == 1
        assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 1)]

    def test_one_that_gains_nowhere_is_left_alone_and_the_next_is_measured(self):
        first, second = kernel(slow, kernel_id="first", priority=9), kernel(QUICK, kernel_id="second")
        report = plan(first, second).report
        (entry,) = report.fused
        assert entry.kernel_id == "second"
        assert len(entry.figures) == 2
        ((name, why),) = entry.rejections
        assert (name, why.kind) == ("first", "slower")
        assert "8 × 8, float32: × 0." in why.reason
        assert "64 × 8, float32: × 0." in why.reason

    def test_that_is_nothing_to_be_strict_about(self):
        report = plan(kernel(slow), strict=True).report
        assert [entry.rejections[0][1].kind for entry in report.left_alone] == ["slower"]

    def test_one_that_gains_without_gradients_only_is_not_used_with_them(self):
        model = Model()
        applied = manager_of(kernel(slow_in_training)).apply_all(model, measure=batch(64))
        (entry,) = applied.report.fused
        assert (entry.gains_from["float32 training"], entry.gains_from["float32 inference"]) == (None, 0)
        x = torch.randn(64, 8, requires_grad=True)
        (calls,) = applied.try_(x)
        assert calls.reasons == ("the kernel is faster at no size with gradients",)
        assert "never used: float32 training" in manager_of(kernel(slow_in_training)).plan(
            model, measure=batch(64)
        ).explain("norms.0")

    def test_for_inference_the_forward_alone_counts(self, timed):
        (entry,) = plan(kernel(slow_in_training, 3), mode="inference").report.fused
        assert entry.gains_from["float32 training"] == entry.gains_from["float32 inference"] == 3
        assert [figure.both for figure in entry.figures] == [None, None]
        assert timed == [((8, 8), False), ((64, 8), False)]

    def test_one_that_fails_in_a_call_of_the_model_is_not_used(self):
        (entry,) = plan(kernel(fails_if_large), measure=batch(1 << 12)).report.left_alone
        ((_, why),) = entry.rejections
        assert why.kind == "error"
        assert "RuntimeError: no room while it and the original were timed with 4096 × 8" in why.reason


class TestTheRule:
    def found(self, gains, declared=EVERY_SIZE, backward=None):
        both = [None] * len(gains) if backward is None else [Timing(1.0, 1.0, gain) for gain in backward]
        figures = [
            Figure((size,), "float32", Timing(1.0, 1.0, gain), each)
            for (size, gain), each in zip(gains.items(), both, strict=True)
        ]
        return measured(declared, figures)

    @pytest.mark.parametrize(
        ("gains", "least"),
        [
            ({10: 1.02, 20: 5.0}, 0),
            ({10: 1.01, 20: 1.02, 30: 9.0}, 20),
            ({30: 9.0, 10: 1.5, 20: 1.0}, 30),
        ],
        ids=["all", "from the second on", "not again once it lost"],
    )
    def test_all_sizes_from_it_on_gain(self, gains, least):
        assert self.found(gains).to_dict().get("float32 inference", 0) == least

    def test_where_calls_of_one_size_differ_all_must_gain(self):
        gain, loss = (Figure(shape, "float32", Timing(1, 1, by)) for shape, by in (((2, 5), 3.0), ((5, 2), 0.5)))
        assert measured(EVERY_SIZE, [gain, loss]) is None

    def test_nothing_at_all(self):
        assert self.found({10: 1.0, 20: 1.01}) is None
        assert self.found({10: 1.0}, backward=[0.3]) is None

    def test_one_kind_of_call(self):
        assert self.found({10: 1.0}, backward=[3.0]).inference[2] == Ends(NEVER)
        assert self.found({10: 3.0}, backward=[1.0]).training[2] == Ends(NEVER)

    TWO_ENDS = Gains((Ends(),) * 4, (Ends(20, 5),) * 4)

    @pytest.mark.parametrize(
        ("gains", "found"),
        [
            ({5: 2.0, 10: 1.0, 20: 2.0}, (20, 5)),
            ({5: 2.0, 10: 2.0}, (10, 5)),
            ({4: 2.0}, (20, 5)),
            ({4: 2.0, 5: 1.0, 10: 1.0, 20: 2.0}, (20, 0)),
            ({5: 2.0, 10: 2.0, 20: 1.0}, (NEVER, 5)),
        ],
        ids=["as declared", "from earlier on", "one end alone", "the small end loses", "the large end loses"],
    )
    def test_both_ends(self, gains, found):
        measured = self.found(gains, self.TWO_ENDS)
        assert measured.inference[2] == found
        assert measured.inference[0] == (20, 5)

    def test_both_ends_lose(self):
        assert self.found({5: 1.0, 20: 1.0}, self.TWO_ENDS) is None

    def test_what_was_not_measured_is_as_declared(self):
        training, inference = (tuple(map(Ends, numbers)) for numbers in ((1, 2, 3, 4), (5, 6, 7, 8)))
        declared = Gains(training, inference)
        assert measured(declared, []) == declared
        assert self.found({10: 2.0, 6: 2.0}, declared) == Gains(training, (*inference[:2], Ends(6), Ends(8)))


class TestWhatIsTimed:
    def test_kinds_of_targets_once_each_by_the_shapes_of_their_parameters(self, timed):
        report = plan(kernel(QUICK), model=Model(8, 8, 4, 4), measure=batch(16)).report
        assert len(report.fused) == 4
        assert timed == [((16, 8), False), ((16, 8), True), ((16, 4), False), ((16, 4), True)]
        assert [entry.figures[0].shape for entry in report.fused] == [(16, 8), (16, 8), (16, 4), (16, 4)]

    def test_calls_that_are_alike_once(self, timed):
        plan(kernel(QUICK), measure=[batch(16), batch(16)], mode="inference")
        assert timed == [((16, 8), False)]

    def test_functions_where_the_model_calls_them_both_of_one_method(self):
        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = Attention()

            def forward(self, x):
                return self.attention(x)

        report = manager_of(RotaryKernel, GateKernel).plan(Whole(), measure={"x": torch.randn(2, 6, 16)}).report
        found = {entry.target.function: entry for entry in report.entries if entry.target is not None}
        assert found.keys() == {"apply_rotary", "apply_gate"}
        for entry in found.values():
            said = [str(figure) for figure in entry.figures] + [why.reason for _, why in entry.rejections]
            assert "2 × 6 × 16, float32: ×" in said[0]

    def test_what_no_batch_calls_keeps_the_declared_size(self):
        report = plan(kernel(QUICK, 7), model=Model(8, 4), measure={**batch(16), "uses": 1}).report
        first, second = report.fused
        assert (len(first.figures), len(second.figures)) == (1, 0)
        assert second.gains_from["float32 training"] == 7
        (note,) = report.notes
        assert note.startswith("not measured: norms.1.forward, because no batch leads to a call of it; toy_norm")

    def test_calls_that_the_kernel_cannot_serve_are_not_timed(self, timed):
        report = plan(
            kernel(QUICK, mixes=((torch.float32, torch.float32),)), measure={"x": batch(8)["x"].half()}
        ).report
        assert timed == []
        assert "its calls are the original's anyway: it has a dtype" in report.notes[0]

    def test_a_target_within_a_scope_is_nothing_by_itself(self):
        report = manager_of(FreeSumKernel).plan(heads.Model(), measure={"x": torch.randn(2, 3, 8)}).report
        (entry,) = report.fused
        assert entry.figures == ()
        (note,) = report.notes
        assert "it serves some calls of the whole model" in note

    def test_one_below_the_site_that_is_asked(self):
        class Above(NormKernel):
            kernel_id = "norm_from_above"
            function = QUICK

            def match(self, site):
                if not hasattr(site.module, "norms"):
                    return None
                found = super().match(replace(site, module=site.module.norms[0]))
                return [replace(each, target=Target(path="norms.0")) for each in found]

        (entry,) = plan(Above).report.fused
        assert str(entry.target) == "norms.0.forward"
        assert len(entry.figures) == 2

    def test_what_a_slower_kernel_would_have_covered(self):
        parent = variant_of(ExpertsKernel, function=f"{__name__}:slow_experts")
        report = plan(parent, NormKernel, model=Experts(), measure={"x": torch.randn(4, 16)}).report
        found = {entry.paths[0]: entry for entry in report.entries}
        assert found[""].rejections[0][1].kind == "slower"
        for path in ("experts.0", "experts.1"):
            assert found[path].covered_by == ""
            assert found[path].figures or found[path].rejections[0][1].kind == "slower"


class TestTheModel:
    def test_nothing_of_it_changes(self):
        model = Model(8, 4)
        x = torch.randn(16, 8, requires_grad=True)
        state = torch.get_rng_state()
        planned = manager_of(kernel(QUICK)).plan(model, measure={"x": x})
        assert planned.report.fused[0].figures
        assert model.calls == 0
        assert torch.equal(torch.get_rng_state(), state)
        assert x.grad is None
        assert all(each.grad is None for each in model.parameters())
        assert not any("forward" in vars(module) for module in model.modules())

    def test_one_that_is_fused_is_measured_unfused_and_stays_as_it_is(self):
        model, manager = Model(), manager_of(kernel(QUICK))
        applied = manager.apply_all(model, measure=batch(16))
        again = manager.apply_all(model, measure=batch(16))
        assert again.report.fused[0].figures[0].forward.gain > 2
        assert [(calls.fused, calls.original) for calls in applied.calls()] == [(0, 0)]
        manager.undo(model)
        assert "forward" not in vars(model.norms[0])

    def test_calls_that_are_timed_are_not_counted(self):
        applied = manager_of(GateKernel).apply_all(Gated(), measure={"x": torch.randn(2, 6, 16)})
        (entry,) = applied.report.fused
        assert entry.gains_from == {}
        assert [(calls.fused, calls.original) for calls in applied.calls()] == [(0, 0)]

    def test_kernels_that_are_in_place_do_not_run(self):
        model, counting = Model(8, 4), kernel(slow_if_small)
        manager_of(counting).apply_all(model, every_size=True)
        ran.clear()
        report = manager_of(kernel(QUICK)).plan(model, only="norms.1", measure=batch(8)).report
        assert report.fused[0].figures
        assert ran["small"] == 0

    def test_under_the_autocast_around_it(self):
        class Projected(Model):
            def __init__(self):
                super().__init__(8)
                self.linear = nn.Linear(8, 8)

            def forward(self, x):
                return super().forward(self.linear(x))

        mixed = kernel(QUICK, mixes=((torch.float32, torch.float32), (torch.bfloat16, torch.float32)))
        with torch.autocast("cpu", torch.bfloat16):
            found = [plan(mixed, model=Projected(), measure=batch(8)).report.fused[0]]
        found.append(plan(mixed, model=Projected(), measure=batch(8)).report.fused[0])
        assert [entry.figures[0].dtype for entry in found] == ["bfloat16", "float32"]

    def test_no_cast_of_a_weight_is_left_to_the_autocast_around_it(self):
        linear, x = nn.Linear(8, 8), torch.randn(2, 8)
        with torch.autocast("cpu", torch.bfloat16):
            with runs_of(linear, {"input": x}).entered():
                before = linear(x)
            linear.load_state_dict({name: -t for name, t in linear.state_dict().items()})
            assert torch.equal(linear(x), -before)

    def test_with_the_gradients_and_in_the_mode_that_it_will_have(self):
        seen = []

        class Telling(Model):
            def forward(self, x):
                seen.append((self.training, torch.is_grad_enabled()))
                return super().forward(x)

        plan(kernel(QUICK), model=Telling(), measure=batch(8))
        plan(kernel(QUICK), model=Telling().eval(), measure=batch(8), mode="inference")
        assert seen == [(True, True), (False, False)]


class TestRandomTokens:
    def lengths(self, **config):
        model = model_of(config_of_type("llama", LLAMA | config), "llama", device="cpu")
        found = batches_of(model, True)
        assert all(each["input_ids"].max() < LLAMA["vocab_size"] for each in found)
        return [tuple(each["input_ids"].shape) for each in found]

    def test_those_that_fit(self):
        assert self.lengths() == [(1, 16), (1, 128), (1, 512), (1, 2048)]
        assert self.lengths(max_position_embeddings=200) == [(1, 16), (1, 128)]

    def test_or_as_many_as_fit(self):
        assert self.lengths(max_position_embeddings=9) == [(1, 9)]

    def test_they_are_what_is_run(self):
        model = model_of(config_of_type("llama", LLAMA | {"max_position_embeddings": 100}), "llama", device="cpu")
        for entry in manager_of(NormKernel).plan(model, measure=True, mode="inference").report.entries:
            assert entry.figures or "1 × 16 × 32, float32" in entry.why_not


class Unique(Model):
    def __deepcopy__(self, memo):
        raise TypeError("there is but one")


class TestErrors:
    @pytest.mark.parametrize("said", [1, "all", [], [1], torch.ones(2)], ids=str)
    def test_what_is_no_batch(self, said):
        with pytest.raises(PlanError, match="give measure= one batch or several"):
            manager_of(NormKernel).plan(Model(), measure=said)

    @pytest.mark.parametrize("how", ["argument", "environment"])
    def test_every_size_contradicts_it(self, how, monkeypatch):
        if how == "environment":
            monkeypatch.setenv("FUSEPLUG_EVERY_SIZE", "1")
        with pytest.raises(PlanError, match="drop one of them"):
            manager_of(NormKernel).plan(Model(), measure=batch(8), every_size=how == "argument")

    @pytest.mark.parametrize(
        ("make", "options", "why"),
        [
            (Model, {"measure": True}, "Model takes no input_ids or has no input embeddings: give measure="),
            (lambda: Model().to("meta"), {}, "on meta: load or build its weights first"),
            (Model, {"device": "cuda"}, "on cpu, and device= says cuda: move the model there first"),
            (
                Model,
                {"measure": [batch(8), {"y": 1}]},
                r"Model, which fails with batch 2 of 2 \(y\): TypeError",
            ),
            (Unique, {}, "TypeError: there is but one"),
        ],
        ids=["no tokens", "on meta", "elsewhere", "a wrong batch", "not to be copied"],
    )
    def test_a_model_that_cannot_be_measured_is_refused(self, make, options, why):
        with pytest.raises(PlanError, match=why):
            manager_of(kernel(QUICK)).plan(make(), **{"measure": batch(8), **options})


class TestTheCommand:
    @pytest.fixture
    def config(self, tmp_path):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama", "max_position_embeddings": 16, **LLAMA})
        )
        return str(tmp_path)

    def run(self, *args):
        try:
            main(("plan", *args))
        except SystemExit as leave:
            return int(leave.code or 0)
        return 0

    def test_it_measures_a_model_with_random_weights(self, config, monkeypatch, capsys):
        monkeypatch.setattr("fuseplug.cli.KernelManager", lambda: manager_of(NormKernel))
        assert self.run(config, "--measure", "--device", "cpu", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["measure_seconds"] > 0
        assert len(told["entries"]) == 5
        for entry in told["entries"]:
            slower = [why["kind"] for why in entry["rejections"]] == ["slower"]
            assert slower or [figure["shape"] for figure in entry["figures"]] == [[1, 16, 32]]

    def test_explaining_tells_the_figures(self, config, monkeypatch, capsys):
        monkeypatch.setattr("fuseplug.cli.KernelManager", lambda: manager_of(NormKernel))
        assert self.run(config, "--measure", "--device", "cpu", "--explain", "model.norm") == 0
        out = capsys.readouterr().out
        assert "1 × 16 × 32, float32: × " in out
        assert "forward and backward" in out

    def test_a_device_that_is_not_here_is_refused(self, config, capsys):
        assert self.run(config, "--measure", "--device", "npu") == 2
        assert "--device npu: this machine has none, and the model must run on it" in capsys.readouterr().err
