"""Where Triton's kernels are run: on a GPU if there is one, else by the interpreter, on the CPU."""

from __future__ import annotations

import pytest
import torch

from fuseplug_backends.triton.kernel import interpreted
from fuseplug_testing.triton import rounding_to_nearest


@pytest.fixture(scope="session")
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if not interpreted():
        pytest.exit("there is no GPU here: set TRITON_INTERPRET=1", returncode=4)
    return "cpu"


@pytest.fixture(scope="session", autouse=True)
def _rounding_as_gpus_do():
    with rounding_to_nearest():
        yield


@pytest.fixture
def poisoned():
    """Memory that is not written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
