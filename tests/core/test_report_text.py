"""What a person reads of a report, on a wide and on a narrow terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fuseplug import Entry, KernelRecord, Rejection, Report, Target

PATH = "model.layers.{}.self_attn"


@pytest.fixture
def report():
    why = Rejection("it raised OSError [x-dist 1.0]", kind="error")
    return Report(
        "LlamaForCausalLM",
        "training",
        [
            Entry((PATH.format(0),), "LlamaAttention", "npu", "rope", Target("forward", "apply"), "npu_fused", "half"),
            Entry((PATH.format(1),), "LlamaAttention", "npu", "rope", Target("forward", "apply"), "npu_fused", "half"),
            Entry(("model.norm",), "LlamaRMSNorm", "npu", "rmsnorm", Target(), rejections=(("npu_norm", why),)),
        ],
        [KernelRecord("needy", "x-needy", state="missing", reason='pip install "x-needy[npu]"')],
        {"other": "runs on cuda; this model is planned for npu"},
        ["a [note]"],
    )


def printed(report, width):
    out = io.StringIO()
    Console(file=out, width=width).print(report)
    return out.getvalue()


@pytest.mark.parametrize("bracketed", ["[x-dist 1.0]", '"x-needy[npu]"', "a [note]"])
def test_brackets_are_shown_as_they_are(report, bracketed):
    assert bracketed in str(report)
    assert bracketed in printed(report, 120)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_paths_and_reasons_stay_readable(report, width):
    lines = printed(report, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(PATH.format("*") in line for line in lines)
    assert any("model.norm" in line for line in lines)
    assert len(lines) < 40


def test_layers_are_one_line(report):
    (row,) = [line.split() for line in str(report).splitlines() if PATH.format("*") in line]
    assert row[-2:] == ["2", PATH.format("*")]
