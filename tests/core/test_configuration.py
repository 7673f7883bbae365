"""Settings in a file, beside the environment variables."""

import json
import re
from pathlib import Path

import pytest
import torch

from fuseplug import KernelManager, SettingsError, configuration
from fuseplug.configuration import SETTINGS, environment
from fuseplug.disk_cache import folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory two levels below *tmp_path*, without Fuseplug's environment variables."""
    deep = tmp_path / "project" / "src"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    return deep


def ours():
    variables = {each.variable for each in SETTINGS.values()}
    return {name: value for name, value in environment().items() if name in variables}


EVERYTHING = 'kernels = ["-a", "x:b"]\nallow = ["one", "two"]\ncache = "off"\nevery_size = true\n'
AS_VARIABLES = {
    "FUSEPLUG_KERNELS": "-a,x:b",
    "FUSEPLUG_ALLOW": "one,two",
    "FUSEPLUG_CACHE": "off",
    "FUSEPLUG_EVERY_SIZE": "1",
}


class TestFile:
    @pytest.mark.parametrize("above", [0, 1, 2])
    @pytest.mark.parametrize(("name", "before"), [("fuseplug.toml", ""), ("pyproject.toml", "[tool.fuseplug]\n")])
    def test_says_what_the_variables_say(self, here, above, name, before):
        assert ours() == {}
        place = (here, *here.parents)[above]
        (place / name).write_text(before + EVERYTHING)
        assert ours() == AS_VARIABLES
        assert environment().source("FUSEPLUG_ALLOW") == place / name

    def test_a_variable_wins(self, here, monkeypatch):
        (here / "fuseplug.toml").write_text(EVERYTHING)
        monkeypatch.setenv("FUSEPLUG_ALLOW", "")
        assert ours() == {**AS_VARIABLES, "FUSEPLUG_ALLOW": ""}
        assert environment().source("FUSEPLUG_ALLOW") is None

    def test_the_nearest_one_counts_alone(self, here):
        (here / "fuseplug.toml").write_text("every_size = false")
        (here / "pyproject.toml").write_text(f"[tool.fuseplug]\n{EVERYTHING}")
        (here.parent / "fuseplug.toml").write_text(EVERYTHING)
        assert ours() == {"FUSEPLUG_EVERY_SIZE": "0"}

    @pytest.mark.parametrize(
        "text", ["", "[tool.other]\nkernels = 1", "not = [toml", "# tool.fuseplug is not set\n[tool]"]
    )
    def test_another_projects_is_passed_by(self, here, text):
        (here / "pyproject.toml").write_text(text)
        (here.parent / "fuseplug.toml").write_text('kernels = "a"')
        assert ours() == {"FUSEPLUG_KERNELS": "a"}

    def test_is_read_again_when_it_changes(self, here):
        for text, said in (('kernels = ["a"]', "a"), ('kernels = ["ab"]', "ab")):
            (here / "fuseplug.toml").write_text(text)
            assert ours() == {"FUSEPLUG_KERNELS": said}
        (here / "fuseplug.toml").unlink()
        assert ours() == {}

    def test_a_directory_that_is_gone_has_none(self, here, monkeypatch):
        def gone():
            raise FileNotFoundError

        (here / "fuseplug.toml").write_text(EVERYTHING)
        monkeypatch.setattr(Path, "cwd", gone)
        assert ours() == {}

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("kernel = ['a']", "there is no setting 'kernel'; there are: kernels, allow, cache, every_size"),
            ("kernels = 3", r"kernels is 3; expected a list of ids, such as .* \(FUSEPLUG_KERNELS\)"),
            ("kernels = ['a', 3]", "kernels is .* expected a list of ids"),
            ("every_size = 1", "every_size is 1; expected true or false"),
            ("cache = '/tmp/elsewhere'", 'cache is .*; expected "off"; a directory has to be named by the variable'),
            ("cache = true", 'cache is True; expected "off"'),
            ("kernels = ", "is not TOML: .*: correct or remove it"),
        ],
    )
    @pytest.mark.parametrize(("name", "before"), [("fuseplug.toml", ""), ("pyproject.toml", "[tool.fuseplug]\n")])
    def test_what_is_wrong_is_an_error_that_names_the_file(self, here, text, why, name, before):
        (here / name).write_text(before + text)
        with pytest.raises(SettingsError, match=f"{re.escape(str(here / name))}:? {why}") as raised:
            KernelManager().plan(torch.nn.Linear(1, 1))
        assert raised.value.path == here / name

    def test_a_table_that_is_none(self, here):
        (here / "pyproject.toml").write_text("tool.fuseplug = 3")
        with pytest.raises(SettingsError, match=r"\[tool.fuseplug\] is 3; expected a table"):
            environment()


class TestObeyed:
    def test_by_discovery_which_names_the_file(self, here, package):
        package("x-a", "a")
        package("x-b", "b")
        (here / "fuseplug.toml").write_text('allow = ["x-a", "x-c"]\nkernels = ["-c"]')
        found = {record.kernel_id: record for record in KernelManager().kernels()}
        assert found["a"].state == "ready"
        assert found["b"].reason == f"allow in {here / 'fuseplug.toml'} does not name x-b"
        assert found["c"].reason.startswith(f"kernels in {here / 'fuseplug.toml'} names it, but")
        assert {r.state for r in KernelManager({}).kernels() if r.distribution.startswith("x-")} == {"ready"}

    def test_by_the_cache(self, here):
        assert folder() is not None
        (here / "fuseplug.toml").write_text('cache = "off"')
        assert folder() is None

    @pytest.mark.parametrize("every", ["true", "false"])
    def test_by_the_sizes(self, here, fusing, every):
        """The error for measuring names the file that asks for every size."""
        (here / "fuseplug.toml").write_text(f"every_size = {every}")
        with pytest.raises(Exception, match=f"every_size in {here}" if every == "true" else "cannot be measured|batch"):
            fusing.plan(torch.nn.Linear(1, 1), measure=3)


class TestCommand:
    def test_shows_what_is_in_force(self, here, fresh_python):
        (here / "fuseplug.toml").write_text('kernels = ["-a"]\nevery_size = true')
        done = fresh_python("-m", "fuseplug", "config", FUSEPLUG_EVERY_SIZE="0", COLUMNS="300")
        told = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
        assert ["kernels", "'-a'", str(here / "fuseplug.toml")] in told
        assert ["every_size", "'0'", "FUSEPLUG_EVERY_SIZE"] in told
        assert ["allow", "not set", "every distribution is allowed"] in told

    def test_json(self, here, fresh_python):
        done = fresh_python("-m", "fuseplug", "config", "--json", FUSEPLUG_KERNELS="a")
        said = json.loads(done.stdout)
        assert said["kernels"] == {"value": "a", "from": "FUSEPLUG_KERNELS"}
        assert said["cache"] == {"value": None, "from": None}
        assert list(said) == list(SETTINGS)

    def test_an_error_has_no_traceback(self, here, fresh_python):
        (here / "fuseplug.toml").write_text("kernel = 1")
        done = fresh_python("-m", "fuseplug", "list")
        assert done.returncode == 2
        assert done.stderr.startswith(f"fuseplug: {here / 'fuseplug.toml'}: there is no setting 'kernel'")


OF_A_RUN = {"FUSEPLUG_AUTO", "FUSEPLUG_RUN", "FUSEPLUG_RUN_MODULES"}
"""Variables for the processes of one ``fuseplug run``, which read no file before they import torch."""


def test_every_variable_of_ours_is_a_setting():
    source = Path(configuration.__file__).parent
    written = {name for path in source.rglob("*.py") for name in re.findall(r'"(FUSEPLUG_[A-Z_]+)"', path.read_text())}
    assert written - OF_A_RUN == {each.variable for each in SETTINGS.values()}
