"""The GPU benchmark, without a GPU: every contender is called correctly, and no wrong contender is timed."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.contest.aims import BEST, GROUPED, Aim, mixture, moving_bytes
from benchmarks.contest.problems import BOTH, EAGER, FORWARD, LIGER, OURS, WORKS, Contender, Kind, Least, LeftOut
from benchmarks.contest.race import Out, Result, race
from benchmarks.contest.timing import FEWEST, DeviceClock, host_clock
from benchmarks.contest.turns import Turn
from benchmarks.gpu import command, end_to_end, models
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.interpreting import let_peers_in
from benchmarks.gpu.overhead import overhead
from benchmarks.gpu.roofline import draw
from benchmarks.gpu.verdict import every_time, left_out, verdicts
from benchmarks.ops import rmsnorm
from benchmarks.ops.linear_cross_entropy import TORCH
from benchmarks.record import RESULTS, save, show
from support.thorough import thorough
from triton.language.extra import libdevice
from triton.runtime import interpreter

from fuseplug_tools.bench import spread

RUN = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run.py"
KIND = Kind(torch.device("cpu"), torch.float32)
UNLIMITED = Budget(math.inf, {})
ABOUT = {"gpu": "a sample", "versions": dict.fromkeys(("torch", "triton", "liger-kernel"), "0")}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(capsys):
    assert command.main([]) == 2
    assert capsys.readouterr().out.strip() == command.NO_GPU


@thorough
def test_its_check_of_itself_finds_everybody_right_and_writes_no_times():
    before = {path: path.stat().st_mtime for path in RESULTS.iterdir()}
    options = ("--device", "cpu", "--shapes", "tiny", "--only", *command.OPS)
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(RUN), *options], env=environ, capture_output=True, text=True, check=False
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert said.strip().endswith(command.CHECKED)
    missing = [line for line in said.splitlines() if "absent" in line]
    may_be_missing = ("quack",) if hasattr(torch.nn.functional, TORCH.removeprefix("F.")) else ("quack", TORCH)
    assert all(any(name in line for name in may_be_missing) for line in missing), said
    assert "out of time" not in said
    assert {path: path.stat().st_mtime for path in RESULTS.iterdir()} == before


@thorough  # the benchmark's check of itself calls all of them, too
@pytest.mark.parametrize("op", command.OPS.values(), ids=lambda op: op.name)
def test_what_a_model_calls_is_right(op):
    op = replace(op, contenders=[contender for contender in op.contenders if contender.name == EAGER])
    timed, out = overhead(op, op.tiny[0], KIND, host_clock)
    assert out == []
    assert [(result.contender, result.work) for result in timed] == [
        (name, work) for work in (FORWARD, BOTH) for name in (EAGER, op.applied.name)
    ]


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.setattr(interpreter, "_implicit_cvt", interpreter._implicit_cvt)
    monkeypatch.setattr(libdevice, "rsqrt", libdevice.rsqrt)
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")
    let_peers_in()


@thorough
@pytest.mark.parametrize("blocks", models.TINY, ids=lambda blocks: blocks.name)
def test_models_are_right_however_they_are_fused(peers, monkeypatch, blocks):
    if "moe" in blocks.model_type:  # our kernels for experts are checked above, in a quarter of a minute
        few = {name: models.CONTENDERS[name] for name in (EAGER, LIGER)}
        monkeypatch.setattr(end_to_end, "CONTENDERS", few)
    timed, out = end_to_end.end_to_end(blocks, KIND, host_clock, UNLIMITED)
    assert out == []
    assert [result.contender for result in timed] == 2 * list(end_to_end.CONTENDERS)


def overwriting(x, w):
    """Computes the right result, but overwrites its argument."""
    y = rmsnorm.torch_own(())(x.clone(), w)
    x.data.zero_()
    return y


class TestTheGate:
    def timed(self, contender):
        op = replace(rmsnorm.OP, contenders=(Contender(EAGER, rmsnorm.eager), contender))
        timed, out = race(op, op.tiny[0], KIND, host_clock, WORKS)
        assert {result.contender for result in timed} <= {EAGER, contender.name}
        return [result for result in timed if result.contender == contender.name], out

    def test_who_is_right_is_timed_in_all_works(self):
        timed, out = self.timed(Contender("right", rmsnorm.torch_own))
        assert [result.work for result in timed] == [*WORKS]
        assert out == []

    @pytest.mark.parametrize(
        ("wrong", "why"),
        [
            (lambda x, w: 1.001 * rmsnorm.torch_own(())(x, w), "result 0 is"),
            (lambda x, w: rmsnorm.torch_own(())(x.detach(), w) + 0 * x, "the gradient of argument 0 is"),
            (lambda x, w: rmsnorm.torch_own(())(x, w.detach()) + 0 * w, "the gradient of argument 1 is"),
            (lambda x, w: rmsnorm.torch_own(())(x, w).half(), "result 0 is torch.float16"),
            (lambda x, w: torch.nan * x * w, "result 0 is inf off"),
        ],
    )
    def test_who_is_wrong_is_not_timed(self, wrong, why):
        timed, out = self.timed(Contender("wrong", lambda _: wrong))
        assert not timed
        assert out[0].fault
        assert out[0].why.startswith(f"wrong: {why}")

    def test_who_overwrites_what_others_are_given_is_not_timed(self):
        timed, out = self.timed(Contender("overwriting", lambda _: overwriting))
        assert not timed
        assert [(o.why, o.fault) for o in out] == [("wrong: its arguments are overwritten", True)]

    def test_who_must_overwrite_gets_copies_that_are_made_anew(self):
        seen = []

        def watched(x, w):
            seen.append(x.detach().clone())
            return overwriting(x, w)

        timed, out = self.timed(Contender("overwriting", lambda _: watched, writes=True))
        assert len(timed) == len(WORKS)
        assert not out
        assert len(seen) == 1 + len(WORKS)
        assert all(torch.equal(x, seen[0]) for x in seen)

    def test_who_is_not_there_is_not_to_blame(self):
        def absent(_):
            import nobody_has_this  # noqa: F401

        def left_out(_):
            raise LeftOut("too slow")

        def broken(_):
            raise RuntimeError("broken\nat length")

        for make, why, fault in (
            (absent, "absent: No module named 'nobody_has_this'", False),
            (left_out, "too slow", False),
            (broken, "fails: RuntimeError: broken", True),
        ):
            timed, out = self.timed(Contender("other", make))
            assert not timed
            assert [(o.contender, o.why, o.fault) for o in out] == [("other", why, fault)]


def test_a_model_that_is_wrong_is_not_timed(monkeypatch):
    def wrong(model):
        model.layers[0].input_layernorm.variance_epsilon = 0.1
        return models.eager(model)

    monkeypatch.setattr(end_to_end, "CONTENDERS", {EAGER: models.eager, "wrong": wrong})
    timed, out = end_to_end.end_to_end(models.TINY[0], KIND, host_clock, UNLIMITED)
    assert {result.contender for result in timed} == {EAGER}
    assert [(o.contender, o.fault) for o in out] == [("wrong", True)]


class TestTheClock:
    """With a stand-in for the device that does everything at once."""

    @pytest.fixture
    def clock(self, monkeypatch):
        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = time.perf_counter()

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return 1e3 * (other.at - self.at)

        device = SimpleNamespace(
            Event=Event,
            synchronize=lambda: None,
            get_device_properties=lambda _: SimpleNamespace(L2_cache_size=1 << 20),
        )
        monkeypatch.setattr(torch, "get_device_module", lambda _: device)
        return DeviceClock(torch.device("cpu"), ahead=True)

    def test_what_is_prepared_is_not_timed_and_is_handed_on(self, clock):
        def prepare():
            time.sleep(0.01)
            return "prepared"

        seen = []
        samples = clock({"a": Turn(prepare, seen.append), "b": Turn(lambda: None, seen.append)}, 0.0)
        assert [len(times) for times in samples.values()] == [FEWEST] * 2
        assert seen[-2:] == ["prepared", None]
        assert max(samples["a"]) < 5e3

    def test_the_cache_is_cold_and_the_host_ahead(self, clock, monkeypatch):
        events = []
        monkeypatch.setattr(clock, "_cold", SimpleNamespace(zero_=lambda: events.append("fill")))
        monkeypatch.setattr(clock, "_fill", 1e3)
        clock({"a": Turn(lambda: events.append("prepare"), lambda _: (time.sleep(0.004), events.append("run")))}, 0.0)
        last = len(events) - 1 - events[::-1].index("prepare")
        between = events[last + 1 : -1]
        assert set(between) == {"fill"}
        assert 4 <= len(between) <= 40
        assert events[-1] == "run"


def sample():
    """Results of two ops, one bound by bytes and one by multiplications; ours wins one, and Liger the other."""

    def result(op, work, contender, microseconds, least):
        return Result(op, "a shape", work, contender, spread([microseconds] * 3), least)

    copied, multiplied = Least(1e9), Least(1e6, 1e12)
    return [
        *(
            result("rmsnorm", work, name, us, copied)
            for work in (FORWARD, BOTH)
            for name, us in ((OURS, 500.0), (LIGER, 750.0), (EAGER, 2000.0), ("torch.compile", 600.0))
        ),
        *(
            result("moe", work, name, us, multiplied)
            for work in (FORWARD, BOTH)
            for name, us in ((OURS, 4000.0), (LIGER, 2000.0), (EAGER, 9000.0))
        ),
    ]


CEILINGS = Ceilings(bandwidth=2.5e12, rate=500e12)


def asked(aim):
    return [replace(result, aim=aim) for result in sample()]


def test_verdicts():
    rows = {row[:3]: row[3:] for row in verdicts(asked(Aim({BEST: 1.0, LIGER: 1.5}, 0.9)), CEILINGS).rows}
    ours = rows["rmsnorm", "a shape", FORWARD]
    assert ours == (500.0, "torch.compile", 600.0, "1.20", "1.50", "4.00", "80%", "missed: < 90%")
    assert rows["moe", "a shape", FORWARD][-1] == f"missed: < 1 × {BEST}, < 1.5 × {LIGER}, < 90%"
    assert verdicts(sample(), CEILINGS).rows[0][-1] == ""
    met = asked(Aim({BEST: 1.0, GROUPED: 9.0}, 0.8))  # there is no aim against a contender that did not take part
    assert verdicts(met[:1], CEILINGS).rows[0][3] == "not timed"  # there is no other contender to compare with
    assert verdicts(met[:2], CEILINGS).rows[0][-1] == "met"


def test_what_is_asked():
    shape = SimpleNamespace(tokens=32768)
    assert moving_bytes(shape, BOTH, Least(256e6)) == Aim({BEST: 0.98}, 0.85)
    assert moving_bytes(shape, FORWARD, Least(255e6)) == Aim({BEST: 0.98}, 0.0)
    assert moving_bytes(shape, "backward", Least(1e9)) is None
    assert mixture(shape, BOTH, Least(1)) == Aim({GROUPED: 0.98, LIGER: 0.98}, 0.6)
    shape.tokens = 128
    assert mixture(shape, BOTH, Least(1)) == Aim({GROUPED: 0.98, LIGER: 0.98}, 0.0)


def test_table_json_and_picture_are_written(tmp_path, capsys):
    out = [Out("rmsnorm", shape, "quack", "absent: no") for shape in ("one", "another")]
    tables = [verdicts(sample(), CEILINGS), left_out(out)]
    show(tables)
    save("gpu", [*tables, every_time(sample(), CEILINGS)], ABOUT, tmp_path)
    draw(sample(), CEILINGS, ABOUT, tmp_path / "gpu.png")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["machine"]["gpu"] == "a sample"
    assert "cpu" in written["machine"]
    assert [len(table["rows"]) for table in written["tables"]] == [4, 1, 14]
    assert written["tables"][1]["rows"][0]["shapes"] == "2 shapes"
    printed = capsys.readouterr().out
    assert "not timed" in printed
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_time_is_divided_by_weight_and_what_is_left_goes_on(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    budget = Budget(10, {"first": 1.0, "second": 3.0, "third": 1.0})
    budget.begin("first")
    now = 119.0
    assert not budget.over
    now = 121.0
    assert budget.over
    budget.begin("second")
    now = 121.0 + 0.74 * 479
    assert not budget.over
    now = 121.0 + 0.76 * 479
    assert budget.over
    budget.begin("third")
    now = 599.0
    assert not budget.over
    now = 601.0
    assert budget.over


def test_what_there_is_no_time_or_memory_for_is_said(monkeypatch):
    run = command.Run(command.parse(["--device", "cpu", "--shapes", "tiny", "--only", "rmsnorm", "rope", "swiglu"]))
    monkeypatch.setattr(command, "host_clock", None)

    def measured(op, *_):
        raise torch.OutOfMemoryError if op.name == "rope" else RuntimeError("broken")

    monkeypatch.setattr(command, "race", measured)
    monkeypatch.setattr(Budget, "over", property(lambda budget: "swiglu" in budget._parts and len(budget._parts) == 2))
    shown = []
    monkeypatch.setattr(command, "show", shown.extend)
    run.everything()
    run.end()
    assert [table.rows for table in shown if table.title == "not measured"] == [
        [
            ("rmsnorm (3, 64)", "out of time"),
            ("swiglu (3, 48)", "RuntimeError: broken"),
            ("rope (2, 3, 4, 2, 16)", "out of memory"),
        ]
    ]
    assert run.faults == 1
