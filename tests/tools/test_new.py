"""``fuseplug new``: what it writes, and what it refuses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.generated import BREAKS, WHAT, broken, generate, passes_until_broken, run_tests
from support.thorough import thorough

from fuseplug.cli import main
from fuseplug.errors import FuseplugError
from fuseplug_tools.new.known_ops import KNOWN_OPS
from fuseplug_tools.new.request import BACKENDS, request_of
from fuseplug_tools.new.writing import render

ROOT = Path(__file__).parents[2]
COMBINATIONS = [(backend, what) for backend in BACKENDS for what in WHAT]
FILES = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".gitignore",
    ".github/workflows/tests.yml",
    "src/fuseplug_my_op/__init__.py",
    "src/fuseplug_my_op/py.typed",
    "src/fuseplug_my_op/kernels.py",
    "src/fuseplug_my_op/backend.py",
    "tests/conftest.py",
    "tests/test_kernel.py",
}
FILES_OF_A_NEW_OP = {f"src/fuseplug_my_op/{name}.py" for name in ("reference", "recognise", "specimens")}


def rendered(backend: str, what: str) -> dict[str, str]:
    op, params = (what, "") if what in KNOWN_OPS else ("", what)
    request = request_of("my-op", op=op, backend=backend, params=params)
    return {str(path): text for path, text in render(request).items()}


@pytest.mark.parametrize(("backend", "what"), COMBINATIONS)
class TestWhatIsWritten:
    def test_all_files(self, backend, what):
        assert set(rendered(backend, what)) == FILES | (set() if what in KNOWN_OPS else FILES_OF_A_NEW_OP)

    def test_python_that_can_be_read(self, backend, what):
        for path, text in rendered(backend, what).items():
            if path.endswith(".py"):
                ast.parse(text)
                assert "$" not in text, path
                assert max(map(len, text.splitlines())) <= 120, path

    def test_a_project_with_the_kernel(self, backend, what):
        tomllib = pytest.importorskip("tomllib")
        files = rendered(backend, what)
        project = tomllib.loads(files["pyproject.toml"])["project"]
        ((kernel_id, value),) = project["entry-points"]["fuseplug.kernels"].items()
        assert kernel_id == f"{backend}_fused_my_op"
        assert "fuseplug" in project["keywords"]
        path, _, name = value.partition(" ")[0].partition(":")
        assert f"class {name}(" in files[f"src/{path.replace('.', '/')}.py"]
        extra = value.partition("[")[2].rstrip("]")
        assert list(project["optional-dependencies"]) == [*filter(None, [extra]), "testing"]
        needed = {re.split(r"[>=<]", each)[0] for each in project["dependencies"]}
        known = [KNOWN_OPS[what].distribution] if what in KNOWN_OPS else []
        assert needed == {"fuseplug", "fuseplug-backends", "torch", *known}

    def test_breaking_it_changes_it(self, tmp_path, backend, what):
        broken(generate(tmp_path / "new", backend, what), backend)
        (path,) = tmp_path.glob("new/src/*/backend.py")
        ast.parse(path.read_text())


def test_every_backend_can_be_broken():
    assert set(BREAKS) == set(BACKENDS)


def test_the_licence_is_ours():
    assert rendered("inductor", "")["LICENSE"] == (ROOT / "LICENSE").read_text()


def test_a_distribution_requires_this_release():
    from packaging.requirements import Requirement

    import fuseplug

    (line,) = re.findall(r'"(fuseplug>[^"]+)"', rendered("inductor", "")["pyproject.toml"])
    assert Requirement(line).specifier.contains(fuseplug.__version__)


class TestTheCommand:
    def test_says_what_it_wrote_and_what_comes_next(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        main_exits(["new", "layernorm", "--params", "weight,bias"])
        said = capsys.readouterr().out
        folder = tmp_path / "fuseplug-layernorm"
        for path in folder.rglob("*"):
            assert path.is_dir() or str(path.relative_to(folder)) in said
        assert "inductor_fused_layernorm" in said
        assert 'Now:\n  cd fuseplug-layernorm\n  pip install -e ".[testing]"\n  pytest\n\n' in said
        _, _, after = said.partition("Then change")
        assert "fuseplug check inductor_fused_layernorm --quick\n" in after
        assert "fuseplug plan MODEL" in after

    def test_overwrites_nothing(self, tmp_path, capsys):
        (tmp_path / "mine.txt").write_text("mine")
        assert main_exits(["new", "layernorm", "--into", str(tmp_path)]) == 2
        assert f"{tmp_path} is not empty" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

    def test_takes_an_empty_folder(self, tmp_path):
        main_exits(["new", "layernorm", "--into", str(tmp_path)])
        assert (tmp_path / "pyproject.toml").exists()

    def test_says_where_it_cannot_write(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        assert main_exits(["new", "layernorm", "--into", str(tmp_path / "file" / "below")]) == 2
        assert "cannot be written" in capsys.readouterr().err


def main_exits(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    return exited.value.code


@pytest.mark.parametrize("name", ["layernorm", "fuseplug-layernorm", "fuseplug_layernorm", "LayerNorm", " layernorm "])
def test_a_name_is_normalised(name):
    assert request_of(name, op="", backend="inductor", params="").distribution == "fuseplug-layernorm"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("", {}, "NAME is ''; expected the name of a distribution"),
        ("../evil", {}, "NAME is '../evil'"),
        ("2norm", {}, "NAME is '2norm'"),
        ("für", {}, "NAME is 'für'"),
        ("norm-", {}, "NAME is 'norm-'"),
        ("rmsnorm", {}, "fuseplug new my-rmsnorm --op rmsnorm"),
        ("fuseplug-testing", {}, "fuseplug-testing is a distribution of Fuseplug's own"),
        ("liger", {}, "fuseplug-liger is a distribution of Fuseplug's own"),
        ("norm", {"backend": "cuda"}, "--backend is 'cuda'; expected one of inductor, triton, npu"),
        ("norm", {"op": "RMSNorm"}, "--op has the name 'RMSNorm'"),
        ("norm", {"op": "torch"}, "'torch', and the templates use it"),
        ("class", {}, "--op has the name 'class'"),
        ("norm", {"op": "rmsnorm", "params": "weight"}, "expected none with --op rmsnorm"),
        ("loss", {"op": "linear_cross_entropy"}, "there is no template for --op linear_cross_entropy"),
        ("norm", {"params": "weight,"}, "--params has the name ''"),
        ("norm", {"params": "weight,weight"}, "it is there twice"),
        ("norm", {"params": "norm"}, "the op has it"),
        ("norm", {"params": "x"}, "the templates use it"),
        ("norm", {"params": "eps=small"}, "--params has eps=small; expected a number"),
        ("norm", {"params": "eps=inf"}, "--params has eps=inf; expected a number"),
    ],
)
def test_what_is_refused(name, options, said):
    with pytest.raises(FuseplugError) as refused:
        request_of(name, **{"op": "", "backend": "inductor", "params": "", **options})
    assert said in str(refused.value)


def test_every_op_of_ours_has_a_template_or_a_reason():
    from fuseplug_tools.new.known_ops import NOT_TEMPLATES

    ours = {path.parents[2].name for path in (ROOT / "kernel-packages").glob("*/src/*/reference.py")}
    assert {op.replace("_", "-") for op in [*KNOWN_OPS, *NOT_TEMPLATES]} == ours


@thorough
def test_the_kit_takes_it_and_its_tests_notice_a_wrong_formula(tmp_path):
    folder = generate(tmp_path / "new", "inductor", "weight,bias,eps=1e-5")
    looks = (
        "--fuseplug-kernel",
        "inductor_fused_my_op",
        "-k",
        "declaration or variants or match or specimens or reads",
    )
    done = run_tests(folder, *looks)
    assert done.returncode == 0, done.stdout
    (path,) = folder.glob("src/*/reference.py")
    path.write_text(path.read_text().replace("* wide", "* wide * 1.0625"))
    done = run_tests(folder, *looks)
    assert re.search(r"FAILED .*specimens\[0 MyOp\]", done.stdout), done.stdout


@thorough
@pytest.mark.parametrize("what", WHAT)
def test_its_own_tests_pass_and_fail_when_it_is_broken(tmp_path, what):
    passes_until_broken(generate(tmp_path / "new", "inductor", what), "inductor")
