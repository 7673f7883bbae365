"""Import torch_npu on a machine without an NPU."""

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
    """Put the stand-in for CANN into this process and import torch_npu on it; once is enough.

    Best before torch is imported: then torch's own loading of torch_npu works. Where torch was imported first, that
    must have been with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, or it has failed. It sets ``TASK_QUEUE_ENABLE=0``.

    Raises:
        HostNPUUnavailable: If something is missing, or if the real CANN is here: it is never stood in for.
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
    """Whether it was put into this process."""
    return _loaded


def _hindrance() -> str:
    """Why it cannot be; ``""`` if it can."""
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
    # The others need this one, and find it by its name because it is there.
    return sorted(directory.glob("*.so"), key=lambda path: path.name != build.RUNTIME)


def _import() -> None:
    # Or torch_npu copies in a thread of its own, and what it copies may come after what is computed here.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    # Or memory that was used before is given out again with what it held; so every byte is poisoned (cann/host.c).
    os.environ["PYTORCH_NO_NPU_MEMORY_CACHING"] = "1"
    os.environ["FUSEPLUG_CACHE"] = "off"  # what passes here must not be taken for what passed on a chip
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # it prints that ASCEND_HOME_PATH is not set, which is as it should be
            import torch
            import torch_npu  # noqa: F401 - for what importing it does

            torch.npu.init()  # type: ignore[attr-defined]
    except Exception as error:
        raise HostNPUUnavailable(
            f"torch_npu cannot be imported on the stand-in ({type(error).__name__}: {error}). It wants the torch of "
            f"its own release, in the build for the CPU: run pip install {_requirement()}"
        ) from error
