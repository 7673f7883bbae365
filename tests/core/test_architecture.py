"""Rules of imports: inside core they go down; kernel packages import public names and what they require.

In each distribution, one module or package names what is private in torch.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fuseplug
from fuseplug_testing.public_names import private_names

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "fuseplug"
KERNELS = ROOT / "kernel-packages"
VERIFY = ROOT / "core" / "verify" / "src" / "fuseplug_verify"
BACKENDS = KERNELS / "backends" / "src" / "fuseplug_backends"
SOURCES = [
    CORE.parent,
    *sorted(ROOT.glob("core/*/src")),
    *sorted(KERNELS.glob("*/src")),
    *sorted((ROOT / "tests").glob("*/src")),
]
TORCH_PRIVATE = (
    "fuseplug/torch_private.py",
    "fuseplug_backends/torch_private/__init__.py",
    "fuseplug_backends/torch_private/inductor.py",
    "fuseplug_tools/torch_private.py",
    "fuseplug_testing/torch_private.py",
    "fuseplug_verify/torch_private.py",
    "fuseplug_host_npu/torch_private.py",
    "fuseplug_linear_cross_entropy/torch_private.py",
)
"""The modules that may use private names of torch: one module or package of each distribution."""

# Lowest first; names on one line do not import each other.
LAYERS = (
    {"errors", "lazy", "process_lock", "reading", "torch_private"},
    {"configuration", "fallback"},
    {"disk_cache"},
    {"contract"},
    {"hookspecs"},
    {"discovery"},
    {"devices", "report"},
    {"patching"},
    {"model_tree"},
    {"planning"},
    {"applications"},
    {"kernel_manager"},
    {"cli"},
    {"__init__", "__main__"},
    {"interface"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
VENDORS = {"transformers", "triton", "torch_npu"}
OF_VENDORS = {"triton/activations.py"}
"""Modules that import their vendor at the top, and that no other module of their distribution imports."""
OF_THE_SAME_RELEASE = ("fuseplug_backends.triton.activations",)
"""Private modules that the kernel packages here may use, because all are released together."""


class Imports(ast.NodeVisitor):
    """The ``(module, name, inside a function)`` of every import; imports for type checkers count only with *types*."""

    def __init__(self, tree: ast.AST, package: tuple[str, ...] = (), *, types: bool = False) -> None:
        self.package = package
        self.types = types
        self.depth = 0
        self.found: list[tuple[str, str, bool]] = []
        self.visit(tree)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING" and not self.types:
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(alias.name, "", self.depth > 0) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else ()
        module = ".".join([*base, *([node.module] if node.module else [])])
        self.found += [(module, alias.name, self.depth > 0) for alias in node.names]


parsed = functools.cache(ast.parse)


def imports(path: Path, source: Path, *, types: bool = False) -> list[tuple[str, str, bool]]:
    return Imports(parsed(path.read_text()), path.relative_to(source).parent.parts, types=types).found


def rooms(module: str, name: str) -> str | None:
    """The part of core that an import reaches; ``None`` if it does not reach core."""
    first, *rest = module.split(".")
    if first != "fuseplug":
        return None
    return (rest or [name if name in RANK else "__init__"])[0]


def upward(core: Path) -> Iterator[str]:
    for path in sorted(core.rglob("*.py")):
        inner = path.relative_to(core).parts
        room = inner[0].removesuffix(".py")
        for module, name, _ in imports(path, core.parent, types=True):
            target = rooms(module, name)
            if target is not None and target != room and RANK[target] >= RANK[room]:
                yield f"{'/'.join(inner)} imports {target}"


def circle(source: Path) -> list[str]:
    """Modules that import each other in a circle, also for type checkers only; empty if there is no circle."""
    files = {".".join(path.relative_to(source).with_suffix("").parts): path for path in source.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    reached = {
        name: {
            f"{module}.{each}" if f"{module}.{each}" in files else module
            for module, each, _ in imports(path, source, types=True)
        }
        for name, path in files.items()
    }
    try:
        TopologicalSorter(reached).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def vendors(core: Path) -> Iterator[str]:
    for path in sorted(core.rglob("*.py")):
        for module, _, late in imports(path, core.parent):
            if module.endswith(".triton.activations"):
                yield f"{path.name} imports {module}"
            vendor = module.partition(".")[0] in VENDORS and not late
            if vendor and path.relative_to(core).as_posix() not in OF_VENDORS:
                yield f"{path.name} imports {module}"


def trespasses(packages: Path) -> Iterator[str]:
    """Yield the imports, in kernel packages, of private names of core and of packages that they do not require."""
    for source in sorted(packages.glob("*/src")):
        own = {path.name for path in source.iterdir()}
        project = source.parent / "pyproject.toml"
        required = re.findall(r'"(fuseplug-[\w-]+)>=', project.read_text()) if project.exists() else []
        importable = own | {name.replace("-", "_") for name in required}
        for path in sorted(source.rglob("*.py")):
            for module, _, _ in imports(path, source):
                first = module.partition(".")[0]
                if first.startswith("fuseplug_") and first not in importable:
                    yield f"{path.name} imports {module}"
            for each in private_names(path.read_text()):
                if (
                    each.module.partition(".")[0] in {"fuseplug", "fuseplug_backends"} - own
                    and each.module not in OF_THE_SAME_RELEASE
                ):
                    yield f"{path.name}: {each}"


class Private(ast.NodeVisitor):
    """The private names of torch in a module's imports, attribute chains, and strings that are one name."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[str] = []
        self.names = {"torch": "torch"}
        """The full name of each imported name, from torch on."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
                self.names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                self.names |= {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"}
        self.visit(tree)

    def say(self, name: str) -> None:
        if re.fullmatch(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*", name):
            self.found.append(name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.say(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.say(f"{node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self.say(".".join([self.names.get(inner.id, "?"), *reversed(chain)]))
        else:
            self.visit(inner)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.say(node.value)


def private(source: Path) -> Iterator[str]:
    for path in sorted(source.rglob("*.py")):
        if (inner := path.relative_to(source).as_posix()) not in TORCH_PRIVATE:
            yield from (f"{inner} has {name}" for name in Private(parsed(path.read_text())).found)


def test_every_part_of_core_has_a_rank():
    assert {path.name.removesuffix(".py") for path in CORE.iterdir() if path.name != "__pycache__"} - {
        "py.typed"
    } == set(RANK)


def test_imports_inside_core_go_down():
    assert list(upward(CORE)) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.parent.name)
def test_no_modules_import_each_other(source):
    assert circle(source) == []


@pytest.mark.parametrize("late", ["", "if TYPE_CHECKING:\n    "])
def test_a_circle_is_found(tmp_path, late):
    package = tmp_path / "fuseplug_one"
    package.mkdir()
    (package / "__init__.py").write_text("from .below import name")
    (package / "below.py").write_text("from . import beside")
    (package / "beside.py").write_text("import fuseplug_one.last")
    (package / "last.py").write_text(f"{late}from .below import name")
    assert set(circle(tmp_path)) == {"fuseplug_one.below", "fuseplug_one.beside", "fuseplug_one.last"}


@pytest.mark.parametrize("source", [CORE, BACKENDS], ids=lambda source: source.name)
def test_core_and_backends_import_vendors_late_or_never(source):
    assert list(vendors(source)) == []


def test_kernel_packages_keep_to_public_names():
    assert list(trespasses(KERNELS)) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.parent.name)
def test_private_names_of_torch_have_a_module_of_their_own(source):
    assert list(private(source)) == []


@pytest.mark.parametrize("name", TORCH_PRIVATE)
def test_the_modules_of_private_names_have_them(name):
    (path,) = (source / name for source in SOURCES if (source / name).exists())
    assert Private(parsed(path.read_text())).found


@pytest.mark.parametrize(
    ("path", "text", "breach"),
    [
        ("contract.py", "from .planning import Plan", "contract.py imports planning"),
        ("contract.py", "from . import planning", "contract.py imports planning"),
        ("contract.py", "import fuseplug.planning", "contract.py imports planning"),
        ("contract.py", "from fuseplug.planning import Plan", "contract.py imports planning"),
        ("contract.py", "def late():\n    from .cli import main", "contract.py imports cli"),
        ("contract.py", "from . import manager", "contract.py imports __init__"),
        ("devices.py", "from .report import Report", "devices.py imports report"),
        ("patching/guard.py", "from ..planning import Plan", "patching/guard.py imports planning"),
        ("contract.py", "if TYPE_CHECKING:\n    from .planning import Plan", "contract.py imports planning"),
        ("patching/guard.py", "from .mark import Mark\nfrom ..errors import PlanError", None),
    ],
)
def test_upward_finds_a_planted_breach(tmp_path, path, text, breach):
    planted = tmp_path / "fuseplug" / path
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    assert list(upward(tmp_path / "fuseplug")) == ([breach] if breach else [])


@pytest.mark.parametrize(
    "text", ["import transformers", "from triton.language import load", "class A:\n  import torch_npu"]
)
def test_vendors_finds_a_planted_breach(tmp_path, text):
    planted = tmp_path / "fuseplug" / "contract.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    assert len(list(vendors(tmp_path / "fuseplug"))) == 1
    planted.write_text("def late():\n    import transformers")
    assert list(vendors(tmp_path / "fuseplug")) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("from fuseplug.planning import make_plan", 1),
        ("from fuseplug.contract import Site", 1),
        ("import fuseplug.patching", 1),
        ("from fuseplug_other.reference import op", 1),
        ("from fuseplug_backends.inductor import plain", 1),
        ("from fuseplug import Site\nfrom fuseplug_one.sites import match", 0),
    ],
)
def test_trespasses_finds_a_planted_breach(tmp_path, text, count):
    planted = tmp_path / "one" / "src" / "fuseplug_one" / "kernels.py"
    planted.parent.mkdir(parents=True)
    planted.write_text(text)
    assert len(list(trespasses(tmp_path))) == count


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch._C._functorch.is_batchedtensor(x)", "torch._C._functorch.is_batchedtensor"),
        ("import torch\ndef f(op: torch._ops.OpOverload): ...", "torch._ops.OpOverload"),
        ("import torch\ntorch.ops.aten._unsafe_view.default(x).shape", "torch.ops.aten._unsafe_view.default"),
        ("import torch._dynamo", "torch._dynamo"),
        ("def late():\n    from torch._subclasses.fake_tensor import FakeTensorMode", None),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from torch.utils._python_dispatch import TorchDispatchMode", None),
        (
            "from torch.autograd import forward_ad\nforward_ad._current_level",
            "torch.autograd.forward_ad._current_level",
        ),
        ("import torch.nn.functional as F\nF._verify_batch_size", "torch.nn.functional._verify_batch_size"),
        ("NAME = 'torch._dynamo.config'", "torch._dynamo.config"),
    ],
)
def test_private_finds_a_planted_breach(tmp_path, text, name):
    (tmp_path / "planted.py").write_text(text)
    (found,) = private(tmp_path)
    assert found.startswith(f"planted.py has {name or 'torch.'}")


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.compiler.is_compiling()\nself._dynamo\nx.storage()._cdata",
        "from torch import Tensor\nTensor.__add__",
        "'Why torch._dynamo is not imported here.'",
        "from fuseplug_backends.torch_private import get_tracing_state",
    ],
)
def test_private_passes_what_is_not(tmp_path, text):
    (tmp_path / "planted.py").write_text(text)
    assert list(private(tmp_path)) == []


HEAVY = ("torch", "transformers", "triton", "torch_npu", "rich", "typer")
LOADED = f"import sys; print(*[name for name in {HEAVY} if name in sys.modules])"


@pytest.mark.parametrize(
    "code",
    [
        "import fuseplug",
        "import fuseplug; dir(fuseplug); fuseplug.BaseKernel, fuseplug.KernelManager, fuseplug.KernelRecord",
        "from fuseplug import manager; assert 'good' in {r.kernel_id for r in manager.kernels()}",
        "import fuseplug_testing; dir(fuseplug_testing); fuseplug_testing.ConformanceError",
        "import fuseplug_testing.plugin, fuseplug_host_npu.plugin",
        "from fuseplug_host_npu import ContractError, FakeNPU, HostNPU, limit, load, reference, require",
        "import fuseplug.interface",
        "import fuseplug_moe.kernels, fuseplug_rmsnorm.kernels, fuseplug_rope.kernels, fuseplug_swiglu.kernels",
        "import fuseplug_causal_conv1d.kernels, fuseplug_gated_delta_rule.kernels, fuseplug_selective_scan.kernels",
        "import fuseplug_linear_cross_entropy.kernels, fuseplug_ssd.kernels",
        "from fuseplug.interface import Kernel; assert Kernel.kernel_id == 'good'",
    ],
)
def test_importing_does_nothing(package, fresh_python, code):
    package("x-good", "good")
    done = fresh_python(f"{code}\n{LOADED}")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_a_public_function_of_a_package_imports_torch_when_it_is_asked_for(fresh_python):
    code = (
        "import fuseplug_linear_cross_entropy, fuseplug_moe, fuseplug_rmsnorm, fuseplug_rope, fuseplug_swiglu\n"
        "fuseplug_linear_cross_entropy.linear_logprob\n"
        "fuseplug_moe.moe, fuseplug_rmsnorm.rms_norm, fuseplug_rope.rope, fuseplug_swiglu.swiglu\n"
    )
    done = fresh_python(f"{code}{LOADED}")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["torch"], "")


def test_importing_does_nothing_can_fail(package, fresh_python):
    package("x-good", "good", source="import rich\nKernel = None")
    done = fresh_python(f"from fuseplug import manager\nmanager.kernels()\n{LOADED}")
    assert "rich" in done.stdout.split()


def test_importing_leaves_the_environment_alone(fresh_python):
    code = "import os; before = dict(os.environ)\nfrom fuseplug import manager; manager.kernels()\n"
    assert fresh_python(f"{code}assert os.environ == before").returncode == 0
    assert fresh_python(f"{code}os.environ['X'] = '1'; assert os.environ == before").returncode == 1


@pytest.mark.parametrize("source", [ROOT / "tests" / "host-npu" / "src", VERIFY.parent], ids=["host-npu", "verify"])
def test_what_is_of_use_by_itself_needs_nothing_of_ours(source):
    (own,) = (path.name for path in source.iterdir())
    found = {
        module.partition(".")[0] for path in source.rglob("*.py") for module, _, _ in imports(path, source, types=True)
    }
    assert {name for name in found if name.startswith("fuseplug")} == {own}


class TestPublicNames:
    def test_each_loads_before_the_others(self, fresh_python):
        code = """
import importlib, sys
names = importlib.import_module("fuseplug").__all__
for name in names:
    for module in [m for m in sys.modules if m.partition(".")[0] == "fuseplug"]:
        del sys.modules[module]
    getattr(importlib.import_module("fuseplug"), name)
print(len(names))
"""
        done = fresh_python(code)
        assert (done.stdout.strip(), done.stderr) == (str(len(fuseplug.__all__)), "")

    def test_are_sorted_and_in_dir(self):
        assert fuseplug.__all__ == sorted(fuseplug.__all__)
        assert set(fuseplug.__all__) <= set(dir(fuseplug))

    def test_others_are_refused_by_name(self):
        with pytest.raises(AttributeError, match="module 'fuseplug' has no attribute 'nothing'"):
            _ = fuseplug.nothing

    def test_version_is_that_of_the_distribution(self):
        from importlib_metadata import version

        assert fuseplug.__version__ == version("fuseplug")
