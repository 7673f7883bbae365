"""Fixtures for the tests of backends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from support import kernels

torch.set_num_threads(1)  # tensors are small, and several runs share few cores


@pytest.fixture
def fresh_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code in a new Python process, with the current environment and *variables*."""

    def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=120)

    return run


@pytest.fixture(autouse=True)
def _as_it_was():
    kernels.ran.clear()
