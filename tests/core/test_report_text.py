"""The text of a report, on wide and on narrow terminals."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fuseplug import Entry, KernelRecord, Rejection, Report, Target
from fuseplug.report.tables import UNLIMITED

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


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_names_are_never_broken(width):
    names = ["acme_fused_gated_delta_rule", "fuseplug-linear-cross-entropy-for-acme 1.10.0"]
    reason = "its numbers are wrong for float32 " * 4
    entries = [
        Entry((f"m.layers.{number}.x",), "AcmeGatedDeltaNet", "cpu", "rule", Target(), names[0], "cast-last")
        for number in range(3)
    ]
    records = [KernelRecord(names[0], names[1], state="missing", reason=reason)]
    lines = printed(Report("Acme", "training", entries, records), width).splitlines()
    assert max(map(len, lines)) <= width
    for word in (names[0], *names[1].split(), "AcmeGatedDeltaNet", "m.layers.*.x"):
        assert any(word in line for line in lines), word


def test_paths_beside_reasons_are_whole():
    path = "model.layers.0.post_attention_layernorm"
    entry = Entry((path,), "AcmeNorm", "cpu", "norm", Target(), "acme_norm", "llama", outranked=("other_norm",))
    assert printed(Report("Acme", "training", [entry]), 120).count(path) == 2


def test_where_nothing_is_wrapped_a_reason_is_one_line(report):
    assert any(
        "runs on cuda; this model is planned for npu" in line for line in printed(report, UNLIMITED).splitlines()
    )
    assert max(map(len, printed(report, UNLIMITED).splitlines())) < 200


class Measured(str):
    """A figure, as a measurer gives it to a report."""


class TestEncodings:
    @pytest.fixture
    def figured(self, report):
        figure = Measured("2 × 3, float32: × 2.00 forward")
        entries = [replace(report.entries[0], figures=(figure,), class_name="Norm×é中"), *report.entries[1:]]
        return replace(report, entries=entries)

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
    def test_it_prints_on_any_stdout(self, figured, monkeypatch, encoding):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
        print(figured, flush=True)
        text = written.getvalue().decode(encoding)
        assert PATH.format(0) in text
        assert "LlamaForCausalLM: 2 of 3 targets fused" in text

    def test_where_the_characters_are_there_nothing_is_changed(self, figured, monkeypatch):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), "utf-8"))
        assert "─" in str(figured)
        assert "Norm×é中" in str(figured)


def test_layers_are_one_line(report):
    (row,) = [line.split() for line in str(report).splitlines() if PATH.format("*") in line]
    assert row[-2:] == ["2", PATH.format("*")]


def test_a_single_layer_is_named(report):
    text = str(replace(report, entries=report.entries[1:]))
    assert PATH.format(1) in text
    assert PATH.format("*") not in text
