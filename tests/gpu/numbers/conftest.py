"""Where Triton's kernels run: on a GPU if there is one, otherwise in the interpreter, on the CPU."""

from __future__ import annotations

import pytest
import torch

from fuseplug_backends.triton.kernel import interpreted


@pytest.fixture(scope="session")
def device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if not interpreted():
        pytest.exit("there is no GPU here: set TRITON_INTERPRET=1", returncode=4)
    return "cpu"


@pytest.fixture(autouse=True)
def _rounding(rounding_as_gpus_do):
    """Has all of these tests round as a GPU does."""
