"""Imports torch_npu on a machine without an NPU."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from .cann import build
from .errors import HostNPUUnavailable

_loaded = False


def load() -> None:
    """Load the stand-in for CANN into this process and import torch_npu on it; further calls do nothing.

    Call this before torch is imported, so that torch's own loading of torch_npu works. If torch is imported first, its
    import fails unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is set. This function sets ``TASK_QUEUE_ENABLE=0``,
    ``PYTORCH_NO_NPU_MEMORY_CACHING=1`` and ``FUSEPLUG_CACHE=off``.

    Raises:
        HostNPUUnavailable: If something is missing, or if this machine has the real CANN, which is never replaced.
    """
    global _loaded
    if _loaded:
        return
    if hindrance := _hindrance():
        raise HostNPUUnavailable(hindrance)
    for library in _libraries(_package(), metadata.version("torch_npu")):
        ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    _import()
    _loaded = True


def is_loaded() -> bool:
    """Whether `load` has loaded the stand-in into this process."""
    return _loaded


def _hindrance() -> str:
    """Why the stand-in cannot be loaded; ``""`` if it can."""
    if platform.system() != "Linux" or sys.byteorder != "little" or sys.maxsize < 1 << 32:
        return f"torch_npu is for 64-bit Linux, not for {platform.system()} {platform.machine()}"
    if os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME"):
        return "CANN is set up here (ASCEND_HOME_PATH), and is never stood in for: use the NPU, or a shell without it"
    if "torch_npu" in sys.modules or _loadable(build.RUNTIME):
        return f"CANN is here ({build.RUNTIME} is found by the loader), and is never stood in for: use the NPU"
    if importlib.util.find_spec("torch_npu") is None:
        return f"torch_npu is not installed: run pip install {_requirement()}"
    return ""


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _requirement() -> str:
    try:
        release = metadata.version("torch").partition("+")[0].split(".")
    except metadata.PackageNotFoundError:
        return "torch torch_npu"
    return f'"torch_npu=={release[0]}.{release[1]}.*" numpy pyyaml'


def _package() -> Path:
    found = importlib.util.find_spec("torch_npu")
    if found is None or not found.submodule_search_locations:
        raise HostNPUUnavailable("torch_npu is not a package here")
    return Path(found.submodule_search_locations[0])


def _libraries(package: Path, version: str) -> list[Path]:
    try:
        directory = build.build(package, version)
    except FileNotFoundError as error:
        raise HostNPUUnavailable(
            f"there is no C compiler ({error.filename}): run apt-get install gcc libc6-dev, or set CC to one"
        ) from error
    except subprocess.CalledProcessError as error:
        raise HostNPUUnavailable(f"the stand-in for CANN does not compile: {error.stderr}") from error
    except OSError as error:
        raise HostNPUUnavailable(f"the stand-in for CANN cannot be kept (set XDG_CACHE_HOME): {error}") from error
    # The other libraries need this one, and find it by its name once it is loaded.
    return sorted(directory.glob("*.so"), key=lambda path: path.name != build.RUNTIME)


def _import() -> None:
    # Otherwise torch_npu copies in a thread of its own, and the CPU may compute before a copy is done.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    # Otherwise torch_npu hands out used memory with its old content. New memory is poisoned, every byte (cann/host.c).
    os.environ["PYTORCH_NO_NPU_MEMORY_CACHING"] = "1"
    os.environ["FUSEPLUG_CACHE"] = "off"  # a check that passes here must not count as passed on a chip
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # torch_npu prints that ASCEND_HOME_PATH is not set, as expected
            import torch
            import torch_npu  # noqa: F401 - for the effects of the import

            torch.npu.init()  # type: ignore[attr-defined]
    except Exception as error:
        raise HostNPUUnavailable(
            f"torch_npu cannot be imported on the stand-in ({type(error).__name__}: {error}). It wants the torch of "
            f"its own release, in the build for the CPU: run pip install {_requirement()}"
        ) from error
