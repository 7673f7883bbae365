"""The settings of a process by name: those of Python, and those of torch if it is imported."""

from __future__ import annotations

import builtins
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_OTHERS_VARIABLES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "PYTEST_")
"""Prefixes of variables that others set: Inductor when it first compiles, pytest for each test."""


def of_python(environ: Iterable[str] = ()) -> dict[str, Any]:
    """The settings of the process that exist without torch.

    Args:
        environ: Environment variables to look up even if they are no longer set.
    """
    found = {
        "random's state": random.getstate(),
        # numpy adds some when it is imported.
        "warnings.filters": [each for each in warnings.filters if "numpy" not in str(each)],
        "sys.path": list(sys.path),
        "sys.excepthook": sys.excepthook,
        "sys.gettrace()": sys.gettrace(),
        "sys.getrecursionlimit()": sys.getrecursionlimit(),
        "sys.getswitchinterval()": sys.getswitchinterval(),
        "threading.excepthook": threading.excepthook,
        "gc.isenabled()": gc.isenabled(),
        "gc.get_threshold()": gc.get_threshold(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the working directory": _working_directory(),
        "the names in builtins": sorted(set(vars(builtins)) - {"_"}),
        "the root logger's level": logging.getLogger().level,
        "the root logger's handlers": list(logging.getLogger().handlers),
        "what logging.disable() disables": logging.root.manager.disable,
    }
    found |= {f"the handler of {each.name}": signal.getsignal(each) for each in signal.Signals}
    found |= {
        f"os.environ[{name!r}]": os.environ.get(name)
        for name in (*os.environ, *environ)
        if not name.startswith(_OTHERS_VARIABLES)
    }
    return found


def of_torch(torch: types.ModuleType) -> dict[str, Any]:
    """The settings of *torch*; numpy's random state and the settings of torch's compilers, if these are imported."""
    from ..torch_private import (  # torch is imported now
        DYNAMO_SETTINGS,
        GLOBAL_HOOKS,
        INDUCTOR_SETTINGS,
        get_printoptions,
        len_torch_function_stack,
    )

    backends = torch.backends
    found = {
        "the default dtype": torch.get_default_dtype(),
        "the default device": _default_device(torch),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_deterministic_algorithms_warn_only_enabled()": (
            torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        "torch.utils.deterministic.fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_num_interop_threads()": torch.get_num_interop_threads(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.get_autocast_dtype('cpu')": torch.get_autocast_dtype("cpu"),
        "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled(),
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled(),
        "torch.backends.cudnn.enabled": backends.cudnn.enabled,
        "torch.backends.cudnn.benchmark": backends.cudnn.benchmark,
        "torch.backends.cudnn.deterministic": backends.cudnn.deterministic,
        "torch.backends.mkldnn.enabled": backends.mkldnn.enabled,
        "torch.backends.cuda.flash_sdp_enabled()": backends.cuda.flash_sdp_enabled(),
        "torch.backends.cuda.math_sdp_enabled()": backends.cuda.math_sdp_enabled(),
        "torch.backends.cuda.mem_efficient_sdp_enabled()": backends.cuda.mem_efficient_sdp_enabled(),
        "whether torch flushes denormal numbers": not (torch.full((), 1e-40, device="cpu") * 1).item(),
        "the number of function modes": len_torch_function_stack(),
        "the hooks of every module": [len(hooks) for hooks in GLOBAL_HOOKS],
        "how torch prints": get_printoptions(),
        "torch's random state": bytes(torch.default_generator.get_state().tolist()),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy's random state"] = numpy.random.get_state()[1].tobytes()
    for name in (DYNAMO_SETTINGS, INDUCTOR_SETTINGS):
        if name in sys.modules:
            found |= {f"{name}.{each}": value for each, value in sys.modules[name].get_config_copy().items()}
    return found


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # somebody has deleted it
        return None


def _default_device(torch: types.ModuleType) -> str:
    try:
        return str(torch.get_default_device())
    except AttributeError:  # torch 2.7, once set_default_device(None) was called
        return "cpu"
