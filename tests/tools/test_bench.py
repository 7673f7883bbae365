"""``fuseplug bench`` compares like with like, reports what is wrong, and labels every figure truly."""

from __future__ import annotations

import itertools
import json
import sys
from io import StringIO
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from support.losses import PlainKernel
from support.managers import manager_of
from support.thorough import first_quick, thorough

from fuseplug import PlanError, kernel_manager
from fuseplug.cli import main
from fuseplug.patching import replacement_of
from fuseplug_rmsnorm.kernels import RMSNormKernel
from fuseplug_rope.kernels import RoPEKernel
from fuseplug_tools.bench import by_turns, compare, peak_memory
from fuseplug_tools.bench.check import distances
from fuseplug_tools.bench.models import SHORT_NAMES, build_random, layers_of
from fuseplug_tools.bench.ops import measure_ops
from fuseplug_tools.bench.shares import shares
from fuseplug_tools.bench.shown import show
from fuseplug_tools.bench.work import MODES, tokens_for
from fuseplug_tools.measuring import sharing

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


class PlainNorms(RMSNormKernel):
    """The reference as a kernel."""

    kernel_id: ClassVar[str] = "plain_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.reference:rms_norm"


class PlainRotations(RoPEKernel):
    """The reference as a kernel."""

    kernel_id: ClassVar[str] = "plain_rope"
    function: ClassVar[str] = "fuseplug_rope.reference:rope"


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def built(name, **options):
    return build_random(name, **{"layers": None, "dtype": torch.float32, "device": "cpu", **options})


def compared(name, kernel=PlainNorms, **options):
    """The result of a quick comparison on the CPU."""
    quick = {"dtype": "float32", "device": "cpu", "repeats": 2, "seconds": 0}
    return compare(name, manager_of(kernel), **quick | options)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only contenders move."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("fuseplug_tools.measuring.turns.time.perf_counter", lambda: clock.now)
    return clock


class TestTurns:
    def test_each_contender_has_every_turn_and_those_of_warming_up_do_not_count(self):
        called, turns = [], []
        contenders = {name: lambda name=name: called.append(name) for name in ("one", "other")}
        found = by_turns(contenders, 10, warm_up=2, after_turn=lambda done: turns.append((done, len(called))))
        assert {name: len(times) for name, times in found.items()} == {"one": 10, "other": 10}
        assert [done for done, _ in turns] == [0, 0, *range(1, 11)]
        ends = [2, *(count for _, count in turns)]  # two calls find out how many are timed together
        half = (ends[1] - 2) // 2
        every_turn = [called[start:end] for start, end in itertools.pairwise(ends)]
        orders = [["one"] * half + ["other"] * half, ["other"] * half + ["one"] * half]
        assert called[:2] == ["one"] * 2
        assert all(turn in orders for turn in every_turn)
        assert all(order in every_turn for order in orders)  # neither always comes after the other

    def test_the_times_are_those_of_one_call(self, clock):
        def takes(seconds):
            return lambda: setattr(clock, "now", clock.now + seconds)

        found = by_turns({"quick": takes(1e-4), "slow": takes(5e-4)}, 3)
        assert found["quick"] == pytest.approx([100.0] * 3)
        assert found["slow"] == pytest.approx([500.0] * 3)

    @pytest.mark.parametrize(("seconds", "calls"), [(1e-4, 20), (0.3, 8)], ids=["short", "longer"])
    def test_a_turn_has_the_calls_that_it_is_to_have_or_more_if_they_are_short(self, clock, seconds, calls):
        made = []

        def run():
            made.append(1)
            clock.now += seconds

        found = by_turns({"only": run}, 3, warm_up=0, at_a_time=8)
        assert len(made) == 2 + 3 * calls
        assert found["only"] == pytest.approx([1e6 * seconds] * 3)

    @pytest.mark.parametrize(
        ("seconds", "least", "turns"),
        [(0.02, None, 26), (0.3, None, 3), (2.0, None, 1), (2.0, 7, 7)],
        ids=["short", "longer", "very long", "very long, and asked for"],
    )
    def test_they_end_in_time(self, clock, seconds, least, turns):
        run = {"only": lambda: setattr(clock, "now", clock.now + seconds)}
        assert len(by_turns(run, 50, warm_up=1, within=0.505, least=least)["only"]) == turns


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody says")
def test_the_peak_is_above_what_was_in_use():
    kept = torch.ones(1 << 24)

    def run():
        torch.ones(1 << 24).add_(kept)

    found = peak_memory(run)
    assert found == pytest.approx(4 << 24, rel=0.2)


class TestModels:
    @pytest.mark.parametrize(
        ("name", "parameters", "layers"),
        [("qwen3-0.6b", 596_049_920, 28), ("qwen3-30b-a3b", 30_532_122_624, 48), ("llama-3-8b", 8_030_261_248, 32)],
    )
    def test_short_names_have_the_shapes_of_the_published_models(self, name, parameters, layers):
        model = built(name.upper(), device="meta", dtype=torch.bfloat16)
        assert sum(each.numel() for each in model.parameters()) == parameters
        assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
        assert layers_of(model) == layers
        assert name in SHORT_NAMES

    def test_layers_are_left_out(self, tiny):
        assert len(built(tiny, layers=2).model.layers) == 2
        assert len(built(tiny).model.layers) == 3

    def test_weights_are_always_the_same_and_nobody_elses_numbers_are_used_up(self, tiny):
        torch.manual_seed(7)
        before = torch.get_rng_state()
        one, other = built(tiny), built(tiny)
        assert torch.equal(torch.get_rng_state(), before)
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        assert one.lm_head.weight.std() > 0

    @pytest.mark.parametrize("layers", [0, 4])
    def test_there_are_only_so_many_layers(self, tiny, layers):
        with pytest.raises(PlanError, match=rf"has 3 layers; expected --layers from 1 to 3, got {layers}"):
            built(tiny, layers=layers)

    def test_contenders_share_their_weights_and_nothing_else(self, tiny):
        model = built(tiny)
        other = sharing(model)
        assert [*map(id, model.parameters())] == [*map(id, other.parameters())]
        assert not {*map(id, model.modules())} & {*map(id, other.modules())}
        manager_of(PlainNorms).apply_all(other, verify=False)
        assert not any("forward" in vars(module) for module in model.modules())


class TestWhatIsRight:
    @pytest.mark.parametrize("gradients", [False, True])
    def test_the_same_model_is_as_near_as_itself(self, tiny, gradients):
        model = built(tiny, dtype=torch.bfloat16)
        found = distances(model, sharing(model), tokens_for(model, 8), gradients=gradients)
        assert [each.what for each in found] == ["logits", "gradients"][: 1 + gradients]
        for each in found:
            assert each.right
            assert each.fused == each.unfused > 1e-4
        assert all(each.grad is None for each in model.parameters())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_another_model_is_not(self, tiny, dtype):
        model = built(tiny, dtype=dtype)
        other = sharing(model)
        other.model.norm.variance_epsilon = 1.0
        assert [each.right for each in distances(model, other, tokens_for(model, 8), gradients=True)] == [False, False]

    def test_a_gradient_that_is_missing_is_wrong(self, tiny):
        model = built(tiny)
        other = sharing(model)
        other.model.norm.forward = lambda x: model.model.norm(x).detach() + 0 * x
        logits, gradients = distances(model, other, tokens_for(model, 8), gradients=True)
        assert logits.right
        assert not gradients.right


class TestWork:
    def test_training_leaves_no_gradients(self, tiny):
        model = built(tiny)
        seen = []
        model.lm_head.weight.register_hook(seen.append)
        MODES["train"](model, tokens_for(model, 8))()
        assert len(seen) == 1
        assert all(each.grad is None for each in model.parameters())

    def test_a_prefill_gives_the_logits_of_the_last_token(self, tiny):
        model, seen = built(tiny), []
        model.lm_head.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits.shape))
        MODES["prefill"](model, tokens_for(model, 8))()
        assert seen == [(1, 1, 64)]

    def test_decoding_is_of_one_token_after_the_prompt(self, tiny):
        model = built(tiny)
        run, seen = MODES["decode"](model, tokens_for(model, 8)), []

        def remember(_module, _inputs, arguments, _output):
            cache = arguments.get("cache", arguments.get("past_key_values"))
            seen.append((arguments["input_ids"].shape, cache.get_seq_length()))

        model.model.register_forward_hook(remember, with_kwargs=True)
        run()
        run()
        assert [shape for shape, _ in seen] == [(1, 1)] * 2
        assert [length for _, length in seen] == [9, 10]


def test_the_shares_are_of_the_time_of_the_unfused_model():
    x = torch.ones(256, 256)
    found = {each.operation: each for each in shares(lambda: x @ x @ x @ x, lambda: x.tanh(), "cpu", most=2)}
    assert found["aten::mm"].after == 0
    assert found["aten::tanh"].before == 0 < found["aten::tanh"].after
    assert sum(each.before for each in found.values()) == pytest.approx(1)


def test_a_mixture_in_float32_is_compared_with_one_in_float64(tmp_path):
    experts = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(TINY | experts))
    model = build_random(str(tmp_path), layers=1, dtype=torch.float32, device="cpu")
    found = distances(model, sharing(model), tokens_for(model, 8), gradients=True)
    assert [each.what for each in found] == ["logits", "gradients"]
    assert all(0 < each.fused == each.unfused < 1e-4 for each in found)


class TestCompare:
    def test_every_mode_number_of_tokens_and_contender_has_a_row(self, tiny):
        steps = []
        modes = ("train", "decode")
        how = {"layers": 1, "tokens": (4, 6), "versus": ("again",), "step": steps.append}
        found = compared(tiny, modes=modes, **how)
        assert [(row.mode, row.tokens, row.contender) for row in found.rows] == [
            (mode, tokens, name) for mode in modes for tokens in (4, 6) for name in ("eager", "fuseplug", "eager again")
        ]
        assert found.right
        assert [each.what for each in found.checked] == ["logits", "gradients"]
        assert len(found.report.fused) == 3
        assert all(row.gain == 1 for row in found.rows if row.contender == "eager")
        assert found.shares.keys() == {(row.mode, row.tokens) for row in found.rows}
        assert [each for each in steps if each and each.startswith("train, 4")][1:-1] == [
            f"train, 4 tokens: {done} turns" for done in range(3)
        ]
        assert "(LlamaForCausalLM, 1 layer, " in found.model

    @pytest.mark.parametrize(("emulated", "dtype"), [(True, "float32"), (False, "bfloat16")])
    def test_bfloat16_is_measured_where_a_cpu_has_instructions_for_it(self, tiny, monkeypatch, emulated, dtype):
        monkeypatch.setattr("fuseplug_tools.bench.comparing.emulates_bfloat16", lambda: emulated)
        found = compared(tiny, dtype=None, layers=1, tokens=(4,), modes=("decode",))
        assert found.model.endswith(f", {dtype}, cpu")

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"dtype": "int8"}, "'int8' is no dtype of a benchmark; expected one of bfloat16, float16, float32"),
            ({"modes": ("generate",)}, "'generate' is no mode of a benchmark; expected one of train, prefill, decode"),
            (
                {"versus": ("unsloth",)},
                "'unsloth' is no contender of a benchmark; expected one of again, compile, liger",
            ),
            ({"tokens": (1,)}, r"tokens are \[1\]; expected numbers from 2 on"),
            ({"repeats": 1}, "repeats is 1; expected at least 2"),
            ({"device": "npu"}, "--device npu: this machine has none"),
            ({"device": "cuba"}, "device='cuba' is unknown: .*did you mean 'cuda'"),
            ({"versus": ("liger",), "device": "cpu"}, "--vs liger"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_what_cannot_be_measured_is_said(self, tiny, given, said):
        with pytest.raises(PlanError, match=said):
            compare(tiny, manager_of(PlainNorms), **given)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"architectures": ["LlamaModel"]}, "is a LlamaModel, whose forward takes no labels; expected a language"),
            (
                {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 16, "num_layers": 1},
                "is a T5ForConditionalGeneration, with an encoder of its own",
            ),
        ],
        ids=["no head", "an encoder"],
    )
    def test_a_model_of_another_kind_is_refused(self, tmp_path, changes, said):
        (tmp_path / "config.json").write_text(json.dumps(TINY | changes))
        with pytest.raises(PlanError, match=said):
            compare(str(tmp_path), manager_of(PlainNorms), device="cpu")


class TestCommand:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        found = manager_of(PlainNorms).kernels()
        monkeypatch.setattr(kernel_manager, "discover", lambda *_: found)
        monkeypatch.setenv("COLUMNS", "120")

    def run(self, *args):
        quick = ("--device", "cpu", "--layers", "1", "--tokens", "4", "--repeats", "2", "--seconds", "0")
        try:
            main(("bench", *args, *quick))
        except SystemExit as leave:
            return int(leave.code or 0)
        return 0

    @thorough
    def test_a_table(self, tiny, capsys):
        assert self.run(tiny, "--vs", "eager,again") == 0
        out = capsys.readouterr().out
        assert "LlamaForCausalLM, 1 layer, " in " ".join(out.split())  # the path before it may have any length
        assert "3 of 3 targets fused" in out
        assert out.count("right") == 2
        lines = [line.split() for line in out.splitlines()]
        assert ["train", "4", "eager"] in [line[:3] for line in lines]
        assert ["eager", "again"] in [line[:2] for line in lines]
        assert "where the time goes, train, 4 tokens" in out
        assert "aten::mm" in out

    def test_json(self, tiny, capsys):
        assert self.run(tiny, "--mode", "prefill", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert [(row["mode"], row["contender"]) for row in found["rows"]] == [
            ("prefill", "eager"),
            ("prefill", "fuseplug"),
        ]
        assert found["right"] is True
        assert [each["what"] for each in found["checked"]] == ["logits"]
        assert (found["report"]["fused"], found["unused"]) == (3, 0)
        assert found["machine"]["cores"]

    def test_kernels_that_computed_nothing_are_counted(self, tiny, capsys, monkeypatch):
        monkeypatch.setattr(PlainNorms, "gains_from", lambda self, use: 1000)
        monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
        assert self.run(tiny, "--mode", "prefill") == 0
        assert "3 fused targets had no call that a kernel computed: --ops says why" in capsys.readouterr().out

    @thorough
    def test_several_are_given_with_commas_or_one_by_one(self, tiny, capsys):
        assert self.run(tiny, "--mode", "prefill, decode", "--tokens", "6,8", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert {(row["mode"], row["tokens"]) for row in found["rows"]} == {
            (mode, tokens) for mode in ("prefill", "decode") for tokens in (4, 6, 8)
        }

    def test_what_is_no_number_of_tokens_is_said(self, tiny, capsys):
        assert self.run(tiny, "--tokens", "6,many") == 2
        assert "as in --tokens 16,512; found 'many'" in " ".join(capsys.readouterr().err.split())

    def test_it_fails_if_the_fused_model_is_wrong(self, tiny, capsys, monkeypatch):
        for name in ("_TIMES", "_ROUNDINGS"):
            monkeypatch.setattr(f"fuseplug_tools.bench.check.{name}", 0)
        assert self.run(tiny) == 1
        assert "WRONG: at most 0 is allowed" in capsys.readouterr().out

    def test_an_error_is_one_line(self, tiny, capsys):
        assert self.run(tiny, "--dtype", "int8") == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("fuseplug: 'int8' is no dtype")


class TestEachKernelByItself:
    @pytest.mark.parametrize(("mode", "work"), first_quick([("train", "forward and backward"), ("prefill", "forward")]))
    def test_every_different_replacement_has_a_row(self, tiny, mode, work):
        found = compared(tiny, tokens=(4,), modes=(mode,), ops=True)
        (row,) = found.ops[mode, 4]
        assert (row.kernel_id, row.variant, row.work) == ("plain_rmsnorm", "llama", work)
        assert row.where == "model.layers.0.input_layernorm and 6 more"
        assert row.sizes == "1 × 4 × 32"
        assert row.gain > 0
        assert row.kernel["n"] == row.original["n"] == 2

    def test_original_and_kernel_get_the_calls_that_the_model_makes(self, tiny, monkeypatch):
        given = []

        def once(runs, _repeats):
            return {name: [run() or 1.0] * 2 for name, run in runs.items()}

        monkeypatch.setattr("fuseplug_tools.bench.ops.by_turns", once)
        monkeypatch.setattr("fuseplug_tools.bench.ops.make", lambda *called: given.append(called))
        model = built(tiny)
        fused = sharing(model)
        applied = manager_of(PlainNorms).apply_all(fused, verify=False)
        ids = tokens_for(model, 5)
        (row,) = measure_ops(model, applied, applied, lambda each: MODES["train"](each, ids)(), 2)
        assert row.declined == ""
        (original, call, leaves), (kernel, same, _) = given
        assert call is same
        assert torch.equal(call.args[1], model.model.embed_tokens(ids))
        assert leaves[0] is call.args[1]
        assert any(each is model.model.layers[0].input_layernorm.weight for each in leaves)
        assert original is type(model.model.norm).forward
        assert torch.equal(original(*call.args), kernel(*call.args))

    @thorough
    def test_a_call_that_is_too_small_to_gain_is_timed_all_the_same_and_said_to_be(self, tiny, monkeypatch):
        class FromAThousandOn(PlainNorms):
            kernel_id: ClassVar[str] = "large_rmsnorm"

            def gains_from(self, use):
                return 1000

        monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
        called = []

        def once(runs, _repeats):
            return {name: [run() or 1.0] * 2 for name, run in runs.items()}

        monkeypatch.setattr("fuseplug_tools.bench.ops.by_turns", once)
        monkeypatch.setattr("fuseplug_tools.bench.ops.make", lambda function, *rest: called.append((function, rest[0])))
        found = compared(tiny, FromAThousandOn, tokens=(4, 64), ops=True)
        (small,), (large,) = found.ops["train", 4], found.ops["train", 64]
        assert small.declined == (
            "it is too small to gain: the main input has 128 elements, and the kernel is faster from 1,000 on"
        )
        assert large.declined == ""
        assert [replacement_of(function).why_not(*call[:2]) for function, call in called[1::2]] == ["", ""]
        text = StringIO()
        show(found, Console(file=text, width=200))
        assert text.getvalue().count("left to the original in the model: it is too small to gain") == 1

    def test_calls_that_the_kernel_leaves_to_the_original_are_said_to_be(self, tiny):
        class WithoutGradients(PlainNorms):
            kernel_id: ClassVar[str] = "inference_rmsnorm"
            differentiable: ClassVar[bool] = False

        model = built(tiny)
        applied = manager_of(WithoutGradients).apply_all(sharing(model), mode="inference", verify=False)
        ids = tokens_for(model, 5)
        (row,) = measure_ops(model, applied, applied, lambda each: MODES["train"](each, ids)(), 2)
        assert row.declined == "gradients are on, and it was checked without them"
        assert (row.kernel, row.gain) == (None, None)

    def test_functions_are_recorded_where_the_model_calls_them(self, tiny):
        model = built(tiny)
        fused = sharing(model)
        applied = manager_of(PlainRotations).apply_all(fused, verify=False)
        assert applied.report.fused
        ids = tokens_for(model, 6)
        (row,) = measure_ops(model, applied, applied, lambda each: MODES["prefill"](each, ids)(), 2)
        assert (row.kernel_id, row.work) == ("plain_rope", "forward")
        assert row.sizes.startswith("1 × 4 × 6 × 8, 1 × 2 × 6 × 8, 1 × 6 × 8")
        assert not any("forward" in vars(module) for module in model.modules())

    def test_a_loss_is_nothing_by_itself(self, tiny):
        model = built(tiny)
        applied = manager_of(PlainKernel).apply_all(sharing(model), verify=False, allow=["lazy_logits"])
        assert applied.report.fused
        ids = tokens_for(model, 5)
        assert measure_ops(model, applied, applied, lambda each: MODES["train"](each, ids)(), 2) == []
