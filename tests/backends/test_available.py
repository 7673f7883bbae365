"""Kernels of a backend name what this machine lacks."""

import os
import sys

import pytest

from fuseplug_backends.inductor import InductorKernel


@pytest.mark.skipif(sys.platform != "linux", reason="the default compiler is another one")
@pytest.mark.parametrize(("name", "environ"), [("g++", {}), ("icpx", {"CXX": "icpx"})])
def test_compiler(tmp_path, monkeypatch, name, environ):
    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path), **environ})

    class Kernel(InductorKernel):
        def match(self, site): ...

    assert "no C++ compiler was found; install one" in Kernel().unavailable("cpu")
    assert Kernel().unavailable("cuda") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton-ascend" in Kernel().unavailable("npu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert Kernel().unavailable("npu") is None
    (tmp_path / name).write_text("")
    (tmp_path / name).chmod(0o755)
    assert Kernel().unavailable("cpu") is None
