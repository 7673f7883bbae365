"""Settings for the tests of fuseplug-verify. Nothing here imports fuseplug: they run where it is not installed."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # tensors are small, and several runs share few cores


@pytest.fixture
def _small_programs_run_as_they_are() -> None:
    """Replaces the fixture for all tests, which imports the programs of kernels: there are none here."""
