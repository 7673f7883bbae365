"""The command line, as people and as programs use it."""

import json
import sys

import pytest
from support.fixtures import ACTIVATION
from support.thorough import first_quick, thorough

from fuseplug import cli, kernel_manager
from fuseplug.cli import main

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(kernel_manager, "discover", lambda *args: [])


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "config.json"


class TestList:
    def test_table(self, run, package):
        package("x-good", "good")
        package("x-broken", "broken", source="1 / 0")
        code, out, err = run("list")
        assert (code, err) == (0, "")
        (row,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["good"]]
        assert row == ["good", "x-good", "1.0", "a:b", "any", "ready"]
        assert "x-broken:broken is broken\n  ZeroDivisionError: division by zero" in out
        assert "Traceback" not in out
        assert "`fuseplug list -v` shows the tracebacks." in out

    def test_verbose_shows_tracebacks(self, run, package):
        package("x-broken", "broken", source="1 / 0")
        assert 'site/x_broken.py", line 1, in <module>\n    1 / 0' in run("list", "-v")[1]

    def test_brackets_are_shown_as_they_are(self, run, package):
        package("x-needy", "needy", extras="[npu]", requires=["no-such-thing"])
        assert 'pip install "x-needy[npu]"' in run("list")[1]

    def test_an_interrupt_says_whose_import_it_was(self, run, package):
        package("x-stops", "stops", source="raise KeyboardInterrupt")
        code, out, err = run("list")
        assert (code, out) == (130, "")
        assert err.startswith("fuseplug: interrupted while importing kernel x-stops:stops")
        assert err.endswith("uninstall x-stops, or leave it out with FUSEPLUG_KERNELS=-stops\n")

    def test_nothing_of_a_plug_in_moves_the_cursor(self, run, package):
        package("x-rude", "rude", source=r"raise OSError('\x1b[2J\x1b]0;owned\x07gone\x9b31m \u202eback\r\nagain')")
        out = run("list")[1]
        assert "OSError: gone back again" in " ".join(out.split())
        assert not {"\x1b", "\x9b", "\x07", "\r", "\u202e"} & set(out)

    @pytest.mark.parametrize("columns", ["80", "120"])
    def test_fits_the_terminal(self, run, package, monkeypatch, columns):
        package("x-distribution-of-a-long-name", "kernel_of_a_long_name_too", source="raise OSError('why ' * 60)")
        monkeypatch.setenv("COLUMNS", columns)
        out = run("list")[1]
        assert max(map(len, out.splitlines())) <= int(columns)
        assert out.count("why") == 60
        assert "\n kernel_of_a_long_name_too " in out

    @pytest.mark.parametrize("columns", [None, "50", "64", "80"])
    def test_names_are_whole_in_a_pipe(self, run, package, monkeypatch, columns):
        names = ["kernel_of_a_long_name_of_its_own", "x-distribution-of-a-long-name-too"]
        package(names[1], names[0], source="raise OSError('why ' * 60)")
        package("x-good", "good")
        monkeypatch.delenv("COLUMNS") if columns is None else monkeypatch.setenv("COLUMNS", columns)
        out = run("list")[1]
        assert " \n" not in out
        table = out[: out.index(" is broken")]
        assert all(any(name in line for line in table.splitlines()) for name in names)
        if columns is None:
            assert any(all(name in line for name in names) for line in table.splitlines())
            assert "why " * 59 in out

    @thorough
    def test_it_prints_on_any_stdout(self, package, fresh_python):
        package("x-odd", "odd", source="raise OSError('é × 中')")
        for arguments in (["list"], ["doctor"]):
            done = fresh_python("-m", "fuseplug", *arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
            assert "UnicodeEncodeError" not in done.stderr
            assert "OSError" in done.stdout

    def test_json(self, run, package):
        package("x-good", "good")
        package("x-broken", "broken", source="1 / 0")
        records = {record["id"]: record for record in json.loads(run("list", "--json")[1])}
        assert records["good"]["state"] == "ready"
        assert records["good"]["device_types"] == []
        assert "1 / 0" in records["broken"]["traceback"]

    def test_nothing_installed(self, run, nothing_installed):
        code, out, _ = run("list")
        assert code == 0
        assert "pip install fuseplug-rmsnorm" in out
        assert json.loads(run("list", "--json")[1]) == []

    @pytest.mark.parametrize(
        ("option", "before", "imported"),
        first_quick([(("--json",), "", "False"), ((), "", "False"), ((), "import torch", "True")]),
    )
    def test_does_not_import_torch(self, package, fresh_python, option, before, imported):
        package("x-good", "good")
        code = (
            f"import atexit, sys\n{before}\n"
            "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
            f"from fuseplug.cli import main; main(['list', *{option}])"
        )
        done = fresh_python(code)
        assert (done.returncode, done.stderr.strip()) == (0, imported)
        assert "good" in done.stdout


class TestPlan:
    def test_report(self, run, package, config):
        package("x-act", "silu", source=ACTIVATION)
        code, out, _ = run("plan", str(config), "--device", "npu", "--include", "silu")
        assert code == 0
        assert "LlamaForCausalLM: 2 of 7 targets would be fused for training on npu" in out
        assert "model.layers.*.mlp.act_fn" in out
        assert "norms are [not] for us" in out

    def test_explain(self, run, package, config):
        package("x-act", "silu", source=ACTIVATION)
        act, norm = "model.layers.1.mlp.act_fn", "model.norm"
        code, out, _ = run("plan", str(config), "--include", "silu", "--explain", act)
        assert (code, out.splitlines()[0]) == (0, f"{act} (SiLUActivation), for training")
        assert "fuses it:" in out
        assert "does not have the kernel's op" not in out.partition("silu")[2].splitlines()[0]
        assert "norms are [not] for us" in run("plan", str(config), "--include", "silu", "--explain", norm)[1]
        code, _, err = run("plan", str(config), "--explain", "model.nrm")
        assert (code, "near it: 'model.norm'" in err) == (2, True)

    @pytest.mark.parametrize(
        "function", ["", '    function = "no_such_vendor:silu"\n'], ids=["", "not even importable"]
    )
    def test_for_a_machine_that_has_what_is_missing_here(self, run, package, config, function):
        needs = {"extras": "[npu]", "requires": ["no-such-vendor>=2; extra == 'npu'"]}
        package("x-act", "silu", source=ACTIVATION + '    device_types = ("npu",)\n' + function, **needs)
        code, out, _ = run("plan", str(config), "--device", "npu", "--include", "silu")
        assert code == 0
        assert "2 of 7 targets would be fused for training on npu" in out
        assert 'the machine that this is planned for needs: pip install "x-act[npu]"' in out
        named = run("plan", str(config), "--device", "cpu", "--include", "silu")[2]
        assert "silu was asked for by name, but is not installed: needs no-such-vendor>=2" in named
        assert "x-act" not in run("plan", str(config), "--device", "cpu")[1]

    def test_json(self, run, package, config):
        package("x-act", "silu", source=ACTIVATION)
        options = ("--include", "silu", "--skip", "model.layers.0", "--mode", "inference", "--device", "cuda:1")
        code, out, _ = run("plan", str(config.parent), *options, "--json")
        report = json.loads(out)
        assert (code, report["model"], report["mode"]) == (0, "LlamaForCausalLM", "inference")
        fused = [entry for entry in report["entries"] if entry["kernel"]]
        assert [(entry["paths"], entry["device_type"], entry["check"]) for entry in fused] == [
            (["model.layers.1.mlp.act_fn"], "cuda", "pending")
        ]

    def test_what_another_distribution_notes_on_a_plan(self, run, distribution, config):
        source = "def note(model, report):\n    yield f'{type(model).__name__} on {report.device_types[0]}'\n"
        distribution("x-notes", entry_points="[fuseplug.notes]\nany = x_notes:note\n", files={"x_notes.py": source})
        assert "note: LlamaForCausalLM on cuda" in run("plan", str(config), "--device", "cuda")[1]
        assert json.loads(run("plan", str(config), "--json")[1])["notes"][-1] == "LlamaForCausalLM on cpu"

    def test_a_note_that_cannot_be_made_says_whose_it_is(self, run, distribution, config):
        source = "def note(model, report):\n    raise LookupError('planted')\n"
        distribution("x-notes", entry_points="[fuseplug.notes]\nany = x_notes:note\n", files={"x_notes.py": source})
        code, out, _ = run("plan", str(config), "--json")
        assert code == 0
        assert json.loads(out)["notes"][-1] == "x-notes (x_notes:note) is broken: LookupError: planted"

    def test_exclude_and_only(self, run, package, config):
        package("x-act", "silu", source=ACTIVATION)
        out = run("plan", str(config), "--include", "silu", "--exclude", "silu", "--json")[1]
        assert json.loads(out)["fused"] == 0
        out = run("plan", str(config), "--include", "silu", "--only", "*.1.mlp", "--only", "model.norm", "--json")[1]
        assert [e["paths"] for e in json.loads(out)["entries"]] == [["model.layers.1.mlp.act_fn"], ["model.norm"]]

    def test_bad_option(self, run, config):
        code, out, err = run("plan", str(config), "--device", "npuu")
        assert (code, out) == (2, "")
        assert err.startswith("fuseplug: ")
        assert "did you mean 'npu'" in err
        assert "Traceback" not in err

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "is not a valid JSON file.\nCorrect it"),
            ("{}", "Should have a `model_type` key"),
            ('{"model_type": "of-tomorrow"}', "pip install --upgrade transformers"),
            ('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}', "add --trust-remote-code"),
        ],
    )
    def test_bad_config(self, run, config, text, said):
        config.write_text(text)
        code, _, err = run("plan", str(config.parent))
        assert code == 2
        assert said in err
        assert "Traceback" not in err

    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/config.json", "nowhere/at/all", "config.json"])
    def test_no_such_path(self, run, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        code, _, err = run("plan", name)
        assert code == 2
        assert f"{name} does not exist" in err

    def test_directory_without_config(self, run, tmp_path):
        assert "is a directory without config.json" in run("plan", str(tmp_path))[2]

    @thorough
    def test_hub_out_of_reach(self, fresh_python):
        done = fresh_python("-m", "fuseplug", "plan", "owner/model", HF_HUB_OFFLINE="1", HF_HOME="/nowhere")
        assert done.returncode == 2
        assert "the config of owner/model cannot be read" in done.stderr
        assert "Without the network, name a downloaded directory or config.json instead." in done.stderr
        assert "Traceback" not in done.stderr

    def test_without_transformers(self, run, monkeypatch, config):
        monkeypatch.setitem(sys.modules, "transformers", None)
        code, _, err = run("plan", str(config))
        assert code == 2
        assert 'not installed: pip install "fuseplug[transformers]"' in err

    def test_nothing_installed(self, run, config, nothing_installed):
        code, out, _ = run("plan", str(config))
        assert code == 0
        assert "0 of 0 targets" in out
        assert "note: no kernels are installed: pip install fuseplug-rmsnorm, for one" in out


class TestBuild:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, "LlamaForCausalLM"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
            ({"architectures": ["OfTomorrow"]}, "LlamaForCausalLM"),
            ({"architectures": ["BertModel"]}, "LlamaForCausalLM"),
            ({"architectures": None}, "LlamaForCausalLM"),
            ({"model_type": "vit", "architectures": None}, "ViTModel"),
        ],
    )
    def test_class(self, config, changes, expected):
        from fuseplug.cli.from_config import build

        config.write_text(json.dumps({**LLAMA, **changes}))
        model = build(str(config))
        assert type(model).__name__ == expected
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.bfloat16"}

    def test_code_of_the_model_runs_only_when_trusted(self, tmp_path):
        from fuseplug import PlanError
        from fuseplug.cli.from_config import build

        ran = tmp_path / "ran"
        (tmp_path / "own.py").write_text(
            f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
            "class Config(LlamaConfig):\n    model_type = 'own'\n"
            "class Model(LlamaForCausalLM):\n    config_class = Config\n"
        )
        auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
        own = {**LLAMA, "model_type": "own", "architectures": ["Model"], "auto_map": auto_map}
        (tmp_path / "config.json").write_text(json.dumps(own))
        with pytest.raises(PlanError, match="--trust-remote-code"):
            build(str(tmp_path))
        assert not ran.exists()
        assert type(build(str(tmp_path), trust_remote_code=True)).__name__ == "Model"
        assert ran.exists()


def test_version(run, fresh_python):
    from importlib_metadata import version

    assert run("--version") == (0, f"fuseplug {version('fuseplug')}\n", "")
    assert fresh_python("-m", "fuseplug", "--version").stdout == f"fuseplug {version('fuseplug')}\n"


@pytest.mark.parametrize("args", [("--help",), ("-h",), ("list", "-h"), ("plan", "-h"), ("doctor", "-h")])
def test_help(run, args):
    code, out, _ = run(*args)
    assert code == 0
    assert "Usage: fuseplug" in out


@pytest.mark.parametrize("args", [("plann",), ("plan",), ("list", "--nope")])
def test_misuse(run, args):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert "Usage: fuseplug" in err


def test_a_bug_keeps_its_traceback(monkeypatch):
    def bug(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli.KernelManager, "kernels", bug)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["list"])
