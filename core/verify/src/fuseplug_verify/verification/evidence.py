"""Hashes of everything that the check of a kernel depends on, so that its result can be kept between runs.

A check depends on three things. *Evidence* is what the original computed on small examples just now, bit for bit, and
the code that it may run: it stands for the module. *Surroundings* are the machine and the versions of everything that
is installed. The rest is the question: kernel, adapter, dtypes and tolerances. No result is kept if one of them has no
stable description, or if code belongs to no installed distribution, and therefore has no version.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
import platform
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Adapter, Candidate, Semantics
from ..loaded import LOADED
from .examples import mixes_run
from .memory import not_dense
from .nested import tensors
from .outcome import Outcome

_VARIABLES = ("TORCH", "INDUCTOR", "TRITON", "CXX", "CC", "OMP_", "MKL_", "KMP_", "ASCEND", "CUDA", "NVIDIA")
"""Prefixes of the names of environment variables that change what is computed."""

_VERSION_FILES = {
    "npu": ("/usr/local/Ascend/driver/version.info", "$ASCEND_HOME_PATH/version.cfg"),
    "cuda": ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"),
    "xpu": ("/sys/module/xe/srcversion", "/sys/module/i915/srcversion"),
}
"""Files with the version of the driver of a device, or of the libraries below torch, by device type."""


class UnstableError(Exception):
    """Something has no description that is the same in another process."""


class Evidence:
    """A hash of what the original did."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._whole = True

    def ran(self, outcome: Outcome) -> None:
        """Add the results of a run."""
        for name, value in outcome.values.items():
            if value is None:
                self._hash.update(f"{name}: none;".encode())
            elif not_dense(value) or value.is_meta:
                self._whole = False
            else:
                self._hash.update(f"{name}: {value.dtype} {tuple(value.shape)};".encode())
                self._hash.update(_bytes(value))

    def code(self, codes: Iterable[types.CodeType]) -> None:
        """Add the code that the original may run."""
        for serialised in sorted(map(_code, codes)):
            self._hash.update(serialised)

    def digest(self) -> str:
        """The hash; ``""`` if something could not be added."""
        return self._hash.hexdigest() if self._whole else ""


def key_of(semantics: Semantics, device: torch.device, options: tuple[bool, ...]) -> str:
    """The hash of all that a kernel's check depends on, with its *options*; ``""`` if the check cannot be kept."""
    candidate, adapter = semantics.candidate, semantics.adapter
    if not semantics.evidence or not candidate.identity:
        return ""
    sizes = tuple(candidate.check_sizes)
    try:
        for package in _packages(candidate, adapter):
            _must_be_installed(package)
        parts = (
            semantics.evidence,
            _surroundings(device),
            stable((candidate.identity, sizes, adapter, options)),
            stable((candidate.mixes, candidate.likely, candidate.exact)),
            stable((candidate.roundings, candidate.working_roundings)),
            *(_shapes(candidate, mix, size) for mix in mixes_run(candidate) for size in sizes),
        )
    except Exception:  # noqa: BLE001 - a third party's example or adapter may raise anything: then nothing is kept
        return ""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def stable(value: Any) -> str:
    """A description of *value* that is the same in each process, and different for different values.

    Raises:
        UnstableError: If there is none: *value* has to consist of plain data, dataclasses, dtypes, devices, classes and
            functions.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return f"{kind.__name__} {value!r}"
    if kind in (torch.dtype, torch.device, torch.Size):
        return str(value)
    if isinstance(value, type | types.FunctionType):
        if "<" in value.__qualname__:
            raise UnstableError(value.__qualname__)
        return f"{value.__module__}.{value.__qualname__}"
    name = f"{kind.__module__}.{kind.__qualname__}"
    if dataclasses.is_dataclass(value):
        parts = [f"{field.name}={stable(getattr(value, field.name))}" for field in dataclasses.fields(value)]
    elif isinstance(value, tuple | list):
        parts = [stable(item) for item in value]
    elif isinstance(value, set | frozenset):
        parts = sorted(stable(item) for item in value)
    elif isinstance(value, dict):
        parts = [f"{stable(key)}: {stable(item)}" for key, item in value.items()]
    else:
        raise UnstableError(name)
    return f"{name}({', '.join(parts)})"


def _shapes(candidate: Candidate, mix: Any, size: int) -> str:
    """The shapes and dtypes of the tensors on which the kernel is checked."""
    example = candidate.example_of(mix, size)
    values = [*tensors(tuple(example.args)), *tensors(tuple(example.kwargs.values())), *example.parameters.values()]
    return stable([(value.dtype, tuple(value.shape)) for value in values])


def _surroundings(device: torch.device) -> str:
    backend = getattr(torch, device.type, None)
    named = [getattr(backend, name, None) for name in ("get_device_name", "get_device_capability")]
    return stable(
        (
            sys.version,
            platform.machine(),
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            device.type,
            [str(ask(device)) for ask in named if ask is not None and device.type != "cpu"],
            _below_torch(device.type),
            torch.version.git_version,
            _installed(),
            sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES)),
        )
    )


def _below_torch(device_type: str) -> list[tuple[str, str]]:
    """The versions of the driver and of the libraries below torch, by source; ``"unknown"`` counts as a version."""
    files, parts = _VERSION_FILES.get(device_type, ()), ("CANN", "DRIVER") if device_type == "npu" else ()
    told = [(path, _told(lambda path: Path(os.path.expandvars(path)).read_text(), path)) for path in files]
    return told + [(part, _told(_version_of_cann, part)) for part in parts]


def _told(tell: Callable[[str], Any], who: str) -> str:
    try:
        return str(tell(who))
    except Exception:  # noqa: BLE001 - torch_npu asks libraries of CANN, which may lack the function
        return "unknown"


def _version_of_cann(part: str) -> Any:
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return npu.utils.get_cann_version(part)


@functools.cache
def _installed() -> tuple[str, ...]:
    """Every distribution that can be imported, with its version: a kernel may call code that others wrote.

    Raises:
        UnstableError: If one was installed while this process ran: the process may have imported earlier files.
    """
    folders = [Path(entry) for entry in sys.path if entry and Path(entry).is_dir()]
    paths = [path for folder in folders for path in folder.iterdir() if path.suffix in (".dist-info", ".egg-info")]
    if late := [path.name for path in paths if path.stat().st_mtime > LOADED]:
        raise UnstableError(f"{late[0]} is newer than this process")
    return tuple(sorted(path.name for path in paths))


def _packages(candidate: Candidate, adapter: Adapter) -> Sequence[str]:
    """The top-level packages whose code takes part."""
    named = [base.__module__ for base in type(adapter).__mro__ if base is not object]
    packages = {name.partition(".")[0] for name in (*candidate.packages, *named, __name__)}
    return sorted(packages - set(sys.stdlib_module_names))


def _must_be_installed(package: str) -> None:
    """Raise an `UnstableError` unless *package* lies where distributions are installed, and so has a version.

    The files of an editable installation, of a checkout on the path and of a script may differ in the next process.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # for a module made by hand, and for a program that is run as a file
        spec = None
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parents[bool(spec.submodule_search_locations)]
        if any(folder.glob("*.dist-info")):
            return
    raise UnstableError(f"{package} is not installed as a distribution")


def _bytes(tensor: Tensor) -> bytes:
    # Through a list, which needs no numpy: torch may be installed without it.
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).tolist())


def _code(code: types.CodeType) -> bytes:
    """What *code* does, as bytes, without its place in a file."""
    constants = b",".join(map(_constant, code.co_consts))
    names = repr((code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags))
    return b"|".join((names.encode(), code.co_code, constants, getattr(code, "co_exceptiontable", b"")))


def _constant(value: Any) -> bytes:
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, frozenset):
        return repr(sorted(map(repr, value))).encode()
    return f"{type(value).__name__} {value!r}".encode()
