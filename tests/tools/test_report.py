"""``fuseplug report`` prints all that an issue needs, and nothing private."""

import json
import re
from pathlib import Path

import pytest
from support.tiny import BASE, HEAD

from fuseplug_tools.redaction import SECRET, redacted
from fuseplug_tools.report import VARIABLES

TOKEN = "hf_" + "abcdefgh" * 4
SECRETS = {"HF_TOKEN": TOKEN, "MY_API_KEY": "swordfish", "PASSWORD": "abc", "USER": "alice", "LOGNAME": "alice"}


@pytest.fixture(autouse=True)
def alice(monkeypatch):
    """The user is alice, with the home /data/alice, on a machine called dgx.example.org."""
    monkeypatch.setenv("HOME", "/data/alice")
    monkeypatch.setattr("platform.node", lambda: "dgx.example.org")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("/data/alice/models, /data/alice", "~/models, ~"),
        ("/data/alices/models", "/data/alices/models"),
        ("/mnt/alice/x and /mnt/alice: alice@dgx.example.org", "/mnt/<user>/x and /mnt/<user>: <user>@<host>"),
        ("alice in wonderland, /mnt/alice2, /mnt/alice.bak", "alice in wonderland, /mnt/alice2, /mnt/alice.bak"),
        ("/home/bob/venv/bin, /Users/carol", "/home/<user>/venv/bin, /Users/<user>"),
        ("connected to dgx, dgx2 and dgx.example.org:8080", "connected to <host>, dgx2 and <host>:8080"),
        ("https://bob:swordfish2@hub.example/x", "https://<login>@hub.example/x"),
        (f"token {TOKEN}!", "token <secret>!"),
        ("token ghp_0123456789abcdefghij", "token <token>"),
        ("found swordfish in a message", "found <secret> in a message"),
        ("PASSWORD=abc, abc", "PASSWORD=<secret>, abc"),
        ("npu_fused_rmsnorm: ready on npu, torch 2.13.0", "npu_fused_rmsnorm: ready on npu, torch 2.13.0"),
    ],
)
def test_what_is_nobodys_business_is_taken_out(text, instead):
    assert redacted(text, SECRETS) == instead


@pytest.mark.parametrize(("user", "host", "home"), [("root", "localhost", "/"), ("npu", "", "/home/npu")])
def test_words_of_kernels_stay(monkeypatch, user, host, home):
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("platform.node", lambda: host)
    monkeypatch.setattr("getpass.getuser", lambda: user)
    text = "ready on npu, root module, localhost, /root/x/y, TOKENIZERS_PARALLELISM false"
    assert redacted(text, {"TOKENIZERS_PARALLELISM": "false"}) == text


def test_a_user_without_a_name_and_a_home(monkeypatch):
    """This is so in a container that runs under a numeric user id."""

    def raises(*_):
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr("getpass.getuser", raises)
    monkeypatch.setattr("pwd.getpwuid", raises)
    monkeypatch.delenv("HOME")
    assert redacted("~/x and /data/alice/x on dgx", {}) == "~/x and /data/alice/x on <host>"


def test_the_page_says_which_variables_are_shown_and_which_values_are_not():
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert all(f"`{name}`" in page for pattern in (VARIABLES, SECRET) for name in pattern.pattern.split("|"))


class TestCommand:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch):
        monkeypatch.setenv("FUSEPLUG_ALLOW", "x-a,fuseplug-rmsnorm")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
        monkeypatch.setenv("EDITOR", "vi")

    def test_the_machine_and_the_environment(self, package, run):
        package("x-a", "a", source="1 / 0")
        code, out, err = run("report")
        assert (code, err) == (0, "")
        assert re.search(r"^ fail +a +broken: ZeroDivisionError", out, re.MULTILINE)
        assert "$ fuseplug doctor\n" in out
        assert "exit status 1\n" in out
        assert "\nASCEND_RT_VISIBLE_DEVICES=0,1\n" in out
        assert "\nHF_TOKEN=<secret>\n" in out
        assert "EDITOR" not in out
        assert "$ fuseplug plan" not in out
        assert not any(line.endswith(" ") for line in out.splitlines())

    def test_the_plan_of_a_model_with_the_options_of_plan(self, run, tmp_path):
        values = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **BASE, **HEAD}
        path = tmp_path / "alice" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(values))
        out = run("report", str(path), "--device", "cpu", "--mode", "inference")[1]
        assert f"$ fuseplug plan {tmp_path}/<user>/config.json --device cpu --mode inference\nQwen3ForCausalLM: " in out
        assert "inductor_fused_rmsnorm" in out.partition("$ fuseplug plan")[2]

    def test_what_fails_is_in_the_report(self, run, monkeypatch):
        assert "does not exist" in run("report", "/nowhere/config.json")[1]
        monkeypatch.setattr("fuseplug.cli.from_config.build", lambda *args, **options: 1 / 0)
        out = run("report", "/nowhere/config.json")[1]
        assert "Traceback (most recent call last):" in out
        assert "ZeroDivisionError" in out
