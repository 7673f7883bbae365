"""Fixtures for pytest: ``host_npu`` computes numbers, ``fake_npu`` checks shapes, dtypes and limits.

Every run of pytest in the environment imports this module, so it imports nothing but pytest until a test uses a fixture
or ``--fuseplug-host-npu`` is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .fake import FakeNPU
    from .host import HostNPU

_OPTION = "--fuseplug-host-npu"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--fuseplug-host-npu``."""
    parser.getgroup("fuseplug").addoption(
        _OPTION,
        action="store_true",
        help="Run everything with an Ascend NPU in host memory. What is missing for it is an error; without this "
        "option, tests with the fixtures host_npu and fake_npu are skipped then.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Load the stand-in before a conftest imports torch, which then finds torch_npu by itself."""
    if early_config.known_args_namespace.fuseplug_host_npu:
        from .errors import HostNPUUnavailable
        from .loading import load

        try:
            load()
        except HostNPUUnavailable as error:
            raise pytest.UsageError(f"{_OPTION}: {error}") from error
        from .host import HostNPU

        npu = HostNPU()
        npu.__enter__()
        early_config.add_cleanup(lambda: npu.__exit__())


@pytest.fixture
def host_npu(_stand_in: None) -> Iterator[HostNPU]:
    """`fuseplug_host_npu.HostNPU`, entered: tensors on device ``npu`` have values, which the CPU computes."""
    from .host import HostNPU

    with HostNPU() as npu:
        yield npu


@pytest.fixture
def fake_npu(_stand_in: None) -> Iterator[FakeNPU]:
    """`fuseplug_host_npu.FakeNPU`, entered: tensors on device ``npu`` have shapes and dtypes, but no values."""
    from .fake import FakeNPU

    with FakeNPU() as npu:
        yield npu


@pytest.fixture(scope="session")
def _stand_in() -> None:
    from .errors import HostNPUUnavailable
    from .loading import load

    try:
        load()
    except HostNPUUnavailable as error:
        pytest.skip(str(error))
