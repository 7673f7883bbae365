"""What the tests of fuseplug-verify share. Nothing here imports fuseplug: they run where it is not installed."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # small tensors, and several runs at once on few cores


@pytest.fixture
def _small_programs_run_as_they_are() -> None:
    """In place of that of all tests, which knows the programs of kernels: there are none here."""
