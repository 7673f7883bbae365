"""Settings and fixtures for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import backends
from support.backends import (  # noqa: F401 - pytest finds them here
    backend,
    fake_backend,
    poisoned,
    rounding_as_gpus_do,
    small_checks,
)

if TYPE_CHECKING:
    import torch

# A test that finds checks kept by another run tests nothing. Processes that tests start inherit this.
os.environ["FUSEPLUG_CACHE"] = "off"
# The models of tests are small, and the originals compute small calls. tests/core/test_gains.py calls as users do.
os.environ["FUSEPLUG_EVERY_SIZE"] = "1"
_WORTH_A_COMPILATION = 1 << 16  # elements


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses a backend where there are several: on a machine with a GPU."""
    parser.addoption("--backend", choices=backends.NAMES, help="whose numbers the tests of the ops ask for")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the backend."""
    backends.NAME = backends.chosen(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while the tests are imported, and never look for it among the imported objects: this saves
    about a twentieth of the time of a run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests of other backends and, for a backend other than Inductor, tests of no backend."""
    return backends.is_for_another(collection_path) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let ``-k`` choose tests by the fixtures that they use: tests with ``fake_npu`` or ``fake_backend`` run on any
    release of torch_npu. Refuse names that differ between processes: workers must collect the same tests.
    """
    for item in items:
        item.extra_keyword_matches.update(getattr(item, "fixturenames", ()))
    if by_address := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{by_address[0]} is named by an address in memory: give its parameters ids=")


@pytest.fixture
def everything_compiled() -> None:
    """Compile programs for small tensors, too, as outside of these tests."""


@pytest.fixture(autouse=True)
def _small_programs_run_as_they_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch run the functions of programs for small tensors: a program takes a second or more to compile, and the
    models of tests need hundreds. A test that wants machine code asks for `everything_compiled`.
    """
    if "everything_compiled" in request.fixturenames:
        return
    from support.programs import by_pytorch

    from fuseplug_backends.inductor import Program

    compiled = Program.__call__

    def call(self: Program, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        large = any(tensor.numel() >= _WORTH_A_COMPILATION for tensor in tensors)
        return compiled(self, *tensors) if large else by_pytorch(self, *tensors)

    monkeypatch.setattr(Program, "__call__", call)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Fix the seed: if one draw in a thousand exceeds a tolerance, the test fails one day without any mistake."""
    import torch  # not earlier: a plug-in must first put the stand-in for torch_npu in place

    # Other devices have generators of their own. On the CPU, only its generator is seeded: torch.manual_seed
    # would record a stack for each type of device that is not initialised yet.
    (torch.default_generator if backends.NAME == "inductor" else torch).manual_seed(0)
