"""``fuseplug check`` for people and for programs; and that the kernel, not the original, is checked."""

import datetime
import importlib.metadata
import json

import pytest
from conformance.zoo import kernels, right
from support.thorough import thorough

from fuseplug import KernelManager
from fuseplug.cli import main
from fuseplug_backends.inductor import compiled, program
from fuseplug_testing import ConformanceError, check_kernel
from fuseplug_testing import command as command_of_kit
from fuseplug_testing.checks import CHECKS
from fuseplug_testing.naming import Named

ZOO = "conformance.zoo"


class NeverGains(kernels.Norm):
    """Computes zeros, and declares to gain only in calls larger than any."""

    function = f"{ZOO}.wrong:zeros"

    def gains_from(self, use):
        return 1 << 60


class LeavesAll(kernels.Norm):
    """Leaves every call to the original."""

    function = f"{ZOO}.wrong:leaves_it"


@pytest.fixture
def run(capsys, monkeypatch):
    """Run ``fuseplug check`` as outside of this repository; returns (exit code, stdout, stderr)."""
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
    monkeypatch.setenv("COLUMNS", "80")

    def run(*args):
        code = 0
        try:
            main(["check", *args])
        except SystemExit as leave:
            code = int(leave.code or 0)
        return code, *capsys.readouterr()

    return run


def test_what_is_right_is_a_table_of_all_checks_and_a_verdict(run):
    code, out, err = run(f"{ZOO}.kernels:Gated", "--quick")
    assert code == 0, out
    lines = out.splitlines()
    assert {check.name for check in CHECKS} <= {line.split()[0] for line in lines if line.strip()}
    assert lines[-1].startswith("passed zoo_gated on cpu, quick, ")
    assert "1 × its result is never lazy" in out
    assert f"zoo_gated on cpu: {len(CHECKS)} checks, 1 specimen, {len(CHECKS)} steps" in " ".join(err.split())
    assert max(map(len, lines)) <= 80


def test_every_fault_is_printed_in_full(run):
    code, out, _ = run(f"{ZOO}.adapters:UnlikeSpecimens", "--checks", "specimens", "--checks", "variants")
    assert code == 1
    said = " ".join(out.split())
    assert "fault specimens: 0 FirstHalf nothing of it is fused: " in said
    assert "or take it out of the specimens" in said
    assert "fault variants: plain is claimed, and found on no specimen" in said
    assert "failed zoo_gated on cpu, standard, 0 s, 2 faults" in said
    assert max(map(len, out.splitlines())) <= 80


def test_json_says_what_was_checked_where_and_what_came_of_it(run):
    code, out, _ = run(f"{ZOO}.adapters:UnlikeSpecimens", "--json", "--checks", "specimens", "--checks", "numbers")
    (found,) = json.loads(out)
    assert code == 1
    assert {name: found[name] for name in ("schema", "verdict", "mode", "only")} == {
        "schema": 1,
        "verdict": "failed",
        "mode": "standard",
        "only": ["specimens", "numbers"],
    }
    assert found["kernel"]["id"] == "zoo_gated"
    assert found["kernel"]["class"] == f"{ZOO}.adapters:UnlikeSpecimens"
    assert found["kernel"]["distribution"] is None
    assert found["device"]["type"] == "cpu"
    assert found["device"]["name"]
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    date = datetime.datetime.fromisoformat(found["date"].replace("Z", "+00:00"))
    assert date.tzinfo is not None
    specimens, numbers = found["checks"]
    assert (specimens["name"], specimens["passed"], specimens["failed"]) == ("specimens", 0, 1)
    assert specimens["faults"][0]["where"] == "0 FirstHalf"
    assert numbers["skipped"] == 1
    assert numbers["not_asked"] == [{"why": "specimens has faults on it", "questions": 1}]


def test_what_a_kernel_prints_is_not_in_the_json(run, monkeypatch):
    norm = right.norm
    monkeypatch.setattr(right, "norm", lambda *args, **options: print("computing") or norm(*args, **options))
    code, out, err = run(f"{ZOO}.kernels:Norm", "--json", "--checks", "numbers")
    assert (code, json.loads(out)[0]["verdict"]) == (0, "partial")
    assert "computing" in err


def test_a_kernel_that_cannot_be_run_here_is_not_passed(run):
    code, out, err = run(f"{ZOO}.kernels:OnAnotherChip", "--checks", "numbers", "--checks", "match")
    assert code == 1
    assert "without its numbers (it runs on npu, and none is here)" in " ".join(err.split())
    assert "unchecked zoo_norm, standard" in out
    assert "the kernel was not run: it runs on npu" in " ".join(out.split())


def test_without_names_every_kernel_that_can_run_here_is_checked(run, monkeypatch):
    ready = [Named(kernels.Gated()), Named(kernels.OnAnotherChip()), Named(NeverGains())]
    monkeypatch.setattr(command_of_kit, "all_ready", lambda: ready)
    code, out, err = run("--checks", "numbers")
    assert code == 1
    assert "zoo_norm is left out: it runs on npu, and none is here" in err
    assert [line.split()[:2] for line in out.splitlines()[-2:]] == [["partial", "zoo_gated"], ["failed", "zoo_norm"]]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("no_such_kernel",), "no_such_kernel is not installed; these are: "),
        ((f"{ZOO}.kernels:Nobody",), "cannot be imported: module 'conformance.zoo.kernels' has no attribute"),
        ((f"{ZOO}.kernels:Norm", "--checks", "number"), "there is no check 'number' (did you mean 'numbers'?)"),
        ((f"{ZOO}.kernels:Norm", "--quick", "--thorough"), "quick and thorough exclude each other"),
        ((f"{ZOO}.kernels:OnAnotherChip", "--device", "cpu"), "zoo_norm runs on npu, not on cpu"),
    ],
)
def test_a_wrong_question_is_an_error_of_usage(run, args, said):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert said in err


def test_a_kernel_that_exits_has_a_fault_and_does_not_end_the_run():
    with pytest.raises(ConformanceError, match="raises SystemExit: 0"):
        check_kernel(type("Exits", (kernels.Norm,), {"function": f"{ZOO}.wrong:exits"}), checks=["numbers"])


def test_quick_asks_everything_of_one_specimen_and_little_of_two_more():
    class Five(kernels.Norm):
        specimens = f"{ZOO}.specimens:five_norms"

    quick = check_kernel(Five, quick=True, checks=["numbers", "shapes", "match"])
    standard = check_kernel(Five, checks=["numbers", "shapes", "match"])
    assert 0 < quick.passed["numbers"] < standard.passed["numbers"]
    assert 0 < quick.passed["shapes"] < standard.passed["shapes"]


@pytest.mark.parametrize("check", ["checkpoint", "in-place", "autocast", "compile", "copies", "casts"])
def test_a_call_that_is_too_small_to_gain_is_checked(check, monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
    with pytest.raises(ConformanceError) as error:
        check_kernel(NeverGains, checks=[check])
    assert {fault.check for fault in error.value.result.faults} == {check}
    assert sum(error.value.result.passed.values()) == (2 if check == "copies" else 0)  # a pickle comes back unfused


@pytest.mark.parametrize("check", ["checkpoint", "in-place", "compile", "undo"])
def test_an_original_that_is_compared_with_itself_is_no_pass(check):
    result = check_kernel(LeavesAll, checks=[check])
    left = [skip for skip in result.skipped if skip.why.startswith("such calls are the original's: ")]
    assert left
    assert check == "undo" or not result.passed[check]


def as_recorded(recording):
    return lambda *tensors: recording.graph(*recording.arguments(tensors))


@thorough
@pytest.mark.parametrize("op", ["rmsnorm", "swiglu"])
def test_quick_runs_the_programs_of_inductor(op, everything_compiled, monkeypatch):
    """At every size. The programs run as they were recorded, because compiling takes a minute."""
    record = next(each for each in KernelManager({}).kernels() if each.kernel_id == f"inductor_fused_{op}")
    if record.kernel.lacks("cpu"):
        pytest.skip(record.kernel.lacks("cpu"))
    started, run, declined = [], compiled.Compiled._run, []
    backend = importlib.import_module(f"fuseplug_{op}.backends.inductor")
    monkeypatch.setattr(backend, "by_reference", lambda compute, *args: declined.append(args) or compute(*args))

    def counted(self, constants, needs, *tensors):
        started.append(needs is None)
        return run(self, constants, needs, *tensors)

    monkeypatch.setattr(compiled.Compiled, "_run", counted)
    monkeypatch.setattr(program, "compiled_by_inductor", lambda recording, *_: (as_recorded(recording), lambda: None))
    monkeypatch.setattr(backend._fused, "_programs", {})
    for check in ("numbers", "sizes"):
        started.clear()
        assert check_kernel(record.kernel, quick=True, checks=[check]).passed[check]
        assert set(started) == {True, False}  # forward and backward
    assert not declined
