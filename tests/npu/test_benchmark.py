"""The benchmark for owners of an NPU, on the one in host memory: wrong contenders are not timed, no time is written."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks.contest.problems import OURS, WORKS, Contender, Kind
from benchmarks.npu import command
from benchmarks.npu.ops import OPS, OWN, TRITON
from support.thorough import thorough

from fuseplug_testing import ConformanceError


@pytest.fixture
def bench(host_npu, tmp_path):
    """Runs the benchmark: ``bench("--only", "rmsnorm")`` returns its status and the rows of its tables."""

    def run(*options):
        status = command.main(["--dry-run", "--folder", str(tmp_path), *options])
        tables = json.loads((tmp_path / "npu.json").read_text())["tables"]
        text = (tmp_path / "npu.txt").read_text()
        assert all(table["title"] in text for table in tables if table["rows"])
        assert "µs" not in json.dumps(tables)
        return status, [table["rows"] for table in tables]

    return run


@pytest.mark.parametrize("ops", [["rmsnorm"], pytest.param(list(OPS), marks=thorough)])
def test_all_are_right_and_called(bench, ops):
    status, (checks, left_out, took_part) = bench("--only", *ops)
    assert status == 0
    assert {row["verdict"] for row in checks} == {"right"}
    assert {row["op"] for row in checks} >= {*ops}
    assert {row["contender"] for row in left_out} == {TRITON}
    called = {(row["op"], row["contender"]) for row in took_part}
    assert called >= {(op, who) for op in ops for who in (OURS, "eager", *([OWN[op].name] if op in OWN else []))}
    assert {row["works"] for row in took_part} == {", ".join(WORKS)}


def test_a_kernel_that_the_kit_finds_wrong_is_not_called(bench, monkeypatch):
    def faulty(kernel, **_):
        error = ConformanceError("planted")
        error.result = SimpleNamespace(passed=Counter())
        raise error

    monkeypatch.setattr(command, "check_kernel", faulty)
    status, (checks, left_out, took_part) = bench("--only", "rmsnorm")
    assert (status, took_part) == (1, [])
    assert [(row["verdict"], row["why not"]) for row in checks] == [("wrong", "planted")]
    assert [(row["op"], row["contender"], row["shapes"]) for row in left_out] == [
        ("rmsnorm", OURS, command.EVERY_SHAPE)
    ]


@pytest.mark.parametrize(("name", "status"), [(OURS, 1), ("a peer", 0)])
def test_who_is_wrong_in_the_race_is_left_out(bench, monkeypatch, name, status):
    op, wrong = OPS["rmsnorm"], Contender(name, lambda _: lambda x, weight: x * weight)
    others = [contender for contender in op.contenders if contender.name not in (name, TRITON)]
    monkeypatch.setitem(OPS, "rmsnorm", replace(op, contenders=(wrong, *others)))
    monkeypatch.setattr(command, "kernels", lambda _: [])
    found, (_, left_out, took_part) = bench("--only", "rmsnorm")
    assert found == status
    assert [row["contender"] for row in left_out] == [name]
    assert left_out[0]["why"].startswith("wrong: ")
    assert name not in {row["contender"] for row in took_part}


def test_a_shape_that_fails_stops_no_other(host_npu, monkeypatch):
    def problem(shape, kind):
        if shape.rows == 1:
            raise RuntimeError("planted")
        return op.problem(shape, kind)

    op = OPS["rmsnorm"]
    shapes = [op.tiny[0]._replace(rows=rows) for rows in (1, 2)]
    monkeypatch.setitem(OPS, "rmsnorm", replace(op, problem=problem, tiny=shapes))
    kind = Kind(torch.device("npu"), torch.float32)
    (timed, (failed,)), (others, _) = command.races(["rmsnorm"], kind, command.parse(["--dry-run"]))
    assert (timed, failed.why, failed.fault) == ([], "RuntimeError: planted", True)
    assert {result.shape for result in others} == {"2 × 64"}


def test_without_an_npu_it_says_so_and_fails(host_npu, monkeypatch, capsys):
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    assert command.main([]) == 2
    assert capsys.readouterr().out.strip() == command.NO_NPU
