"""Triton without a GPU: the resources that compiled programs take, and an interpreter that rounds as GPUs do.

>>> from fuseplug_testing.triton import compile_only
>>> with compile_only(90) as programs:  # doctest: +SKIP
...     rms_norm(torch.randn(4, 4096, dtype=torch.bfloat16), torch.ones(4096))
>>> programs[0].name, programs[0].registers, programs[0].spills  # doctest: +SKIP
('_forward', 40, 0)

Importing this module does not import triton.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuseplug_backends.triton.kernel import interpreted

__all__ = ["Program", "compile_only"]

_SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a block may have, by compute capability: CUDA C++ Programming Guide, table 27."""

_THREADS = 1024
"""The most threads that a block may have."""

_absent = itertools.count(1 << 20)
"""Numbers of devices that are not here. Triton keeps compiled programs by device, and has none for a new number."""


@dataclass(frozen=True)
class Program:
    """One kernel, compiled for certain constants, types and alignments of its arguments.

    Attributes:
        name: The name of the kernel's function.
        registers: Registers of each thread.
        spills: Bytes of each thread that did not fit into registers.
        shared: Bytes of shared memory of each block.
    """

    name: str
    registers: int
    spills: int
    shared: int


@contextlib.contextmanager
def compile_only(capability: int = 90) -> Iterator[list[Program]]:
    """Inside, Triton compiles the launched kernels for an NVIDIA GPU, and computes nothing.

    Arguments may be CPU tensors. The host does all of its work except the driver's call, so this work can be timed.

    Args:
        capability: The compute capability of the GPU, 90 for 9.0.

    Yields:
        The programs that launches have needed so far, each once.

    Raises:
        RuntimeError: In Triton's interpreter, which compiles nothing.
        triton.runtime.errors.OutOfResources: Inside, if a program needs more than the GPU has.
    """
    if interpreted():
        raise RuntimeError("TRITON_INTERPRET is set, so Triton compiles nothing: unset it before triton is imported")
    from triton.runtime import driver

    programs: list[Program] = []
    before = driver._active  # asking for .active would look for a GPU
    driver.set_active(_driver(capability, programs))
    try:
        yield programs
    finally:
        driver._active = before


@contextlib.contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Inside, Triton's interpreter rounds float32 to bfloat16 as GPUs do; without the interpreter, nothing changes.

    By itself, the interpreter truncates. In a sum over rows, such as the gradient of a weight, these errors add up.
    """
    if not interpreted() or importlib.util.find_spec("triton") is None:
        yield
        return
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut_off(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = cut_off


def _driver(capability: int, programs: list[Program]) -> Any:
    from triton.backends.compiler import GPUTarget

    device = next(_absent)

    def load_binary(name: str, cubin: bytes, shared: int, _device: int) -> tuple[Any, ...]:
        found = _resources(cubin)
        program = Program(name, found["REG"], found["STACK"] + found["LOCAL"], shared)
        programs.append(program)
        return object(), None, program.registers, program.spills, _THREADS

    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: device,
        get_current_stream=lambda _device: 0,
        launcher_cls=lambda _source, _metadata: _nothing,
        utils=SimpleNamespace(
            load_binary=load_binary,
            unload_module=_nothing,
            get_device_properties=lambda _device: {"max_shared_mem": _SHARED[capability]},
        ),
    )


def _nothing(*_: Any) -> None:
    pass


def _resources(cubin: bytes) -> dict[str, int]:
    """The resources that a binary takes, as ``cuobjdump`` says, which comes with Triton."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - Triton's own
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", said.rpartition("Function")[2])}
