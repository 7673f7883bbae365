"""What all tests share."""

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

# A test that finds what another run has kept tests nothing. Processes that tests start inherit this.
os.environ["FUSEPLUG_CACHE"] = "off"
# The models of tests are small, and small calls are the originals'. tests/core/test_gains.py has calls as users make.
os.environ["FUSEPLUG_EVERY_SIZE"] = "1"
_WORTH_A_COMPILATION = 1 << 16  # elements


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a backend be chosen where there are several: on a machine with a GPU."""
    parser.addoption("--backend", choices=backends.NAMES, help="whose numbers the tests of the ops ask for")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the backend."""
    backends.NAME = backends.chosen(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without looking for garbage, and never again look for it among what they imported: about a
    twentieth of the time of a run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what is about another backend, and with other backends than Inductor what is about none."""
    return backends.is_for_another(collection_path) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests be chosen by the fixtures that they use: those of ``fake_npu`` and ``fake_backend`` run on any release
    of torch_npu. Refuse names that another process would not give: workers must collect the same.
    """
    for item in items:
        item.extra_keyword_matches.update(getattr(item, "fixturenames", ()))
    if by_address := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{by_address[0]} is named by an address in memory: give its parameters ids=")


@pytest.fixture
def everything_compiled() -> None:
    """Has programs compiled for small tensors, too, as they are outside of these tests."""


@pytest.fixture(autouse=True)
def _small_programs_run_as_they_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes a second or more to compile, and models of tests need hundreds: for small tensors its function is
    run by PyTorch. A test that wants machine code asks for `everything_compiled`.
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
    """A tolerance that one draw in a thousand exceeds is a test that fails one day, for nobody's mistake."""
    import torch  # not before a plug-in had its say: torch_npu needs its stand-in first

    # Other devices have generators of their own. On the CPU, torch would note a stack for each device that may come.
    (torch.default_generator if backends.NAME == "inductor" else torch).manual_seed(0)
