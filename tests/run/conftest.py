"""Fixtures for the tests of ``fuseplug run``: processes, and a kernel that compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import commands
from support.fixtures import checked_once, examined_once  # noqa: F401 - pytest finds them here

from fuseplug_tools.run.command import injected
from fuseplug_tools.run.options import RunOptions

PLAIN = """
from typing import ClassVar
from fuseplug_rmsnorm.kernels import RMSNormKernel

class PlainNorms(RMSNormKernel):
    kernel_id: ClassVar[str] = "plain_rmsnorm"
    function: ClassVar[str] = "fuseplug_rmsnorm.reference:rms_norm"
"""
"""A kernel whose function is the reference."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder on ``PYTHONPATH``."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


@pytest.fixture
def environ(site):
    """The environment of processes whose only kernel is `PLAIN`."""
    info = site / "plain-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fuseplug.kernels]\nplain_rmsnorm = plain_kernels:PlainNorms\n")
    (site / "plain_kernels.py").write_text(PLAIN)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FUSEPLUG_ALLOW": "plain"}


@pytest.fixture
def python(environ):
    """Run Python like a child of ``fuseplug run``: ``python(*args, options=…, **variables)``."""

    def run(*args, options=None, **variables):
        env = injected(environ, options or RunOptions()) | variables
        return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, timeout=300)

    return run


@pytest.fixture
def fuseplug_run(environ):
    """Run a command line: ``fuseplug_run("--strict", "--", "true")``."""

    return lambda *args, **variables: commands.fuseplug_run(*args, env=environ | variables)
