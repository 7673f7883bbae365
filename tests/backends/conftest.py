"""What the tests of backends share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from support import kernels

torch.set_num_threads(1)  # small tensors, and several runs at once on few cores


@pytest.fixture
def fresh_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a Python of its own, with the environment of now and *variables*."""

    def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=120)

    return run


@pytest.fixture(autouse=True)
def _as_it_was():
    kernels.ran.clear()
