"""Fixtures of several folders of tests: small real distributions to discover, and fresh Python processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from fuseplug import torch_private
from fuseplug.cli import main
from fuseplug_verify import Candidate, Refusal, Semantics, Subject, Verifier
from fuseplug_verify.verification import evidence
from support import kernels
from support.managers import manager_of
from support.models import Toy

KERNEL = """
from fuseplug import BaseKernel

class Kernel(BaseKernel):
    kernel_id = "{}"
    op = function = reference = "a:b"

    def match(self, site):
        return None
"""


# A kernel that claims every SiLU, and computes the same.
ACTIVATION = """
from fuseplug import Adapter, BaseKernel, Example, Proposal, Rejection, Target
from dataclasses import dataclass

@dataclass(frozen=True)
class Plain(Adapter):
    variant: str = "plain"

    def bind(self, compute):
        return lambda module, x: compute(x)

class Kernel(BaseKernel):
    kernel_id = "silu"
    op = "silu"
    function = reference = "torch.nn.functional:silu"

    def match(self, site):
        if "RMSNorm" in type(site.module).__name__:
            return Rejection("norms are [not] for us")
        if type(site.module).__name__ not in ("SiLU", "SiLUActivation"):
            return None
        import torch
        def example(mix, size, generator):
            return Example((torch.randn(2, size // 2 + 1, dtype=mix, generator=generator),))
        return [Proposal(Target(), [Plain()], example, (torch.float32,))]
"""


def write_distribution(
    site: Path,
    name: str,
    version: str = "1.0",
    entry_points: Mapping[str, str] | str = "",
    files: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
) -> None:
    """Write what ``pip install`` leaves behind: a dist-info directory, and modules beside it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n")
    if not isinstance(entry_points, str):
        entry_points = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[fuseplug.kernels]\n{entry_points}")
    for path, text in (files or {}).items():
        (site / path).write_text(text)
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def as_on_other_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch 2.11 behave like other releases: on it, a plan leaves compiled calls to the originals.

    test_gains.py tests that, on every release.
    """
    monkeypatch.setattr(torch_private, "MISCOMPILES_FUNCTIONS", False)


@pytest.fixture
def examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find out only once, for all tests, what each toy model computes."""
    monkeypatch.setattr(Verifier, "examine", _examined_once)


@pytest.fixture
def checked_once(
    examined_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Keep the checks that a kernel passed for later tests, as they are kept for a user's next process.

    For tests of what becomes of a fused model: most of their time would go into the same few checks.
    """
    monkeypatch.setenv("FUSEPLUG_CACHE", str(tmp_path_factory.getbasetemp() / "kept"))
    monkeypatch.setattr(evidence, "_must_be_installed", lambda package: None)  # no check is kept for a checkout
    monkeypatch.setattr(evidence, "_installed", lambda: ())  # nor after tests have installed distributions


_EXAMINED: dict[Hashable, Semantics | Refusal] = {}
_EXAMINE = Verifier.examine


def _examined_once(verifier: Verifier, subject: Subject, candidate: Candidate) -> Semantics | Refusal:
    """`Verifier.examine`, whose answers for toys are kept for later tests.

    The key has all that an answer depends on: no test puts other functions into the globals that a toy's code reads.
    """
    names = {
        subject.original.__module__,
        getattr(candidate.example, "__module__", ""),
        candidate.identity[0].rpartition(".")[0],
    }
    toy = None if subject.module is None else _described(subject.module)
    if not names <= {"support.models", "support.kernels"} or toy == ():
        return _EXAMINE(verifier, subject, candidate)
    offered = [getattr(candidate, field.name) for field in fields(candidate) if field.name != "example"]
    values = [tuple(value) if isinstance(value, list) else value for value in offered]
    key = (subject.original, subject.space, toy, candidate.example.__code__, *values)
    if key not in _EXAMINED:
        _EXAMINED[key] = _EXAMINE(verifier, subject, candidate)
    answer = _EXAMINED[key]
    return answer if isinstance(answer, Refusal) else replace(answer, candidate=candidate)


def _described(module: torch.nn.Module, *, below: bool = False) -> tuple[Hashable, ...]:
    """A full description of *module*, if all that it has is plain; otherwise an empty tuple."""
    own = {name: value for name, value in vars(module).items() if name[0] != "_" and (below or name != "forward")}
    children = [(name, _described(child, below=True)) for name, child in module.named_children()]
    plain = all(type(value) in (bool, int, float, str) for value in own.values()) and not module._buffers
    hooked = below and any(value for name, value in vars(module).items() if "hooks" in name)
    if not plain or hooked or not all(description for _, description in children):
        return ()
    tensors = [
        (name, type(p), p.dtype, p.device, p.shape, p.requires_grad)
        for name, p in module._parameters.items()
        if p is not None
    ]
    return (type(module), *sorted(own.items()), *tensors, *children)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in front of everything else on ``sys.path``, whose modules are forgotten afterwards."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONPATH", str(directory))
    before = set(sys.modules)
    yield directory
    for name in set(sys.modules) - before:
        if str(directory) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def distribution(site: Path) -> Callable[..., None]:
    """Install a distribution: ``distribution(name, version, entry_points, files, requires)``."""

    def install(name: str, *args: object, **kwargs: object) -> None:
        write_distribution(site, name, *args, **kwargs)

    return install


@pytest.fixture
def package(distribution: Callable[..., None]) -> Callable[..., None]:
    """Install a distribution with one kernel: ``package(name, kernel_id, source=…, requires=…)``."""

    def install(name: str, kernel_id: str, *, source: str | None = None, extras: str = "", **kwargs: object) -> None:
        module = name.replace("-", "_")
        distribution(
            name,
            entry_points={kernel_id: f"{module}:Kernel {extras}".strip()},
            files={f"{module}.py": KERNEL.format(kernel_id) if source is None else source},
            **kwargs,
        )

    return install


@pytest.fixture
def fresh_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code, or ``-m module …``, in a new Python process, with the current environment and *variables*."""

    def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *(args if args[0].startswith("-") else ("-c", *args))]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=120)

    return run


@pytest.fixture
def manager():
    """A new manager, which ignores whatever happens to be installed."""
    return manager_of()


@pytest.fixture
def fusing():
    """A manager with the right kernels."""
    return manager_of(kernels.NormKernel, kernels.RotaryKernel)


@pytest.fixture
def model():
    return Toy().eval()


@pytest.fixture(autouse=True)
def as_it_was():
    kernels.ran.clear()
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    assert torch.get_default_dtype() is torch.float32, "a test left another default dtype behind"


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*args: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(args)
        except SystemExit as leave:
            code = int(leave.code or 0)
        return code, *capsys.readouterr()

    return run
