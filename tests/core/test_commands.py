"""Commands and measurers of other distributions are found by entry points, imported late, and reported if broken."""

import json

import pytest
import torch
from support.models import Toy

from fuseplug import KernelManager, PlanError
from fuseplug.cli import commands
from fuseplug.planning import measurer

HELLO = '''
import typer

def hello(name: str = "you", loud: bool = False) -> None:
    """Greet somebody. At length."""
    typer.echo(f"hello {name}{'!' * loud}")

app = typer.Typer(add_completion=False)
app.command(context_settings={"allow_interspersed_args": False})(hello)
'''
LOADED = "import atexit, sys; atexit.register(lambda: print(sorted({}.intersection(sys.modules)), file=sys.stderr))\n"


@pytest.fixture
def command(distribution):
    """Install a distribution with one command."""

    def install(name, entry, source=HELLO):
        module = name.replace("-", "_")
        distribution(name, entry_points=f"[fuseplug.commands]\n{entry}\n", files={f"{module}.py": source})

    return install


@pytest.fixture
def without_tools(monkeypatch):
    monkeypatch.setattr(commands, "GROUP", "no.such.group")


@pytest.mark.parametrize("name", ["hello", "app"])
def test_a_third_partys_command_is_found(command, run, name):
    command("x-hello", f"greet = x_hello:{name}")
    assert run("greet", "--name", "me", "--loud") == (0, "hello me!\n", "")
    assert "Greet somebody. At length." in run("greet", "-h")[1]
    assert "greet" in run("-h")[1]


def test_one_whose_module_is_broken_is_said_and_costs_nobody_else_anything(command, run):
    command("x-bad", "bad = x_bad:bad", source="raise SystemExit('planted')")
    code, out, err = run("bad", "--any", "thing")
    assert (code, out) == (2, "")
    assert err == "fuseplug: `fuseplug bad`: x-bad (x_bad:bad) is broken: SystemExit: planted\n"
    assert run("list")[0] == 0
    code, out, _ = run("--help")
    assert code == 0
    assert "x-bad (x_bad:bad) is broken" in out
    assert "Measure what the kernels gain" in out


def test_of_two_with_one_name_none_wins(command, run):
    command("x-one", "greet = x_one:hello")
    command("x-two", "greet = x_two:hello")
    code, out, err = run("greet")
    assert (code, out) == (2, "")
    assert "x-one (x_one:hello) and x-two (x_two:hello) have a command of this name: uninstall all but one" in err


def test_nobody_takes_the_place_of_cores_own(command, run):
    command("x-list", "list = x_list:hello")
    assert "hello" not in run("list", "--json")[1]


def test_listing_imports_no_command_and_no_help_imports_torch(command, fresh_python):
    command("x-hello", "greet = x_hello:hello")
    names = {"torch", "x_hello", "fuseplug_tools.bench.command"}
    code = f"{LOADED.format(names)}from fuseplug.cli import main; main(['list'])"
    assert fresh_python(code).stderr == "[]\n"
    assert fresh_python(code.replace("'list'", "'--help'")).stderr == "['fuseplug_tools.bench.command', 'x_hello']\n"


@pytest.mark.usefixtures("without_tools")
@pytest.mark.parametrize("name", ["bench", "doctor", "no-command"])
def test_without_the_tools_it_is_said_what_to_install(run, name):
    code, out, err = run(name, "--option")
    assert (code, out) == (2, "")
    assert err.startswith(f"fuseplug: there is no command {name!r} here")
    assert err.endswith("not installed: pip install fuseplug-tools\n")
    assert json.loads(run("list", "--json")[1])


def entry_points(*values):
    made = [measurer.importlib_metadata.EntryPoint("m", value, measurer.GROUP) for value in values]
    return lambda group: made if group == measurer.GROUP else []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((), "measure= needs fuseplug-tools, which is not installed: pip install fuseplug-tools"),
        (("no_such_module:f",), "cannot import no_such_module:f: ModuleNotFoundError"),
        (("a:f", "b:f"), "measure= needs one measurer, and a:f and b:f bring one: uninstall all but one"),
    ],
)
def test_without_a_measurer_nothing_is_measured_or_changed(manager, monkeypatch, values, said):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
    monkeypatch.setattr(measurer.importlib_metadata, "entry_points", entry_points(*values))
    model = Toy()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(PlanError, match=said):
        manager.apply_all(model, measure=True)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert manager.applied_to(model) is None


def refuses_everything(model, measure, *, device_type, gradients, anew):
    """A measurer of a third party."""
    assert (measure, device_type, gradients, anew) == (True, None, True, False)
    raise PlanError(f"asked about a {type(model).__name__}")


def test_anybody_may_measure(monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
    monkeypatch.setattr(measurer.importlib_metadata, "entry_points", entry_points(f"{__name__}:refuses_everything"))
    with pytest.raises(PlanError, match="asked about a Linear"):
        KernelManager({}, find=lambda *_: []).plan(torch.nn.Linear(1, 1), measure=True)
