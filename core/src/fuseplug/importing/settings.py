"""The settings of a process by name: those of Python, and those of torch where it is imported."""

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
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

Setting = str
"""The name of a setting, as it is said to people."""

_OTHERS_VARIABLES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "PYTEST_")
"""Inductor sets its own environment variables when it first compiles, and pytest for each test."""


def of_python(environ: Iterable[str] = ()) -> dict[str, Any]:
    """Settings of the process that are there without torch.

    Args:
        environ: Environment variables that are looked up even if they are no longer set.
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


def of_torch(torch: types.ModuleType, *, compilers: bool = True) -> dict[str, Any]:
    """Settings of *torch*, of numpy's random state if numpy is imported, and of torch's compilers if they are.

    Args:
        torch: The module.
        compilers: ``False`` leaves out the compilers' hundreds of settings.
    """
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
    for name in (DYNAMO_SETTINGS, INDUCTOR_SETTINGS) if compilers else ():
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


def of_fresh_torch(torch: types.ModuleType) -> dict[Setting, Any]:
    """The settings that *torch* has on every machine when it has just been imported."""
    return {
        "the default dtype": torch.float32,
        "the default device": "cpu",
        "torch.is_grad_enabled()": True,
        "torch.is_inference_mode_enabled()": False,
        "torch.are_deterministic_algorithms_enabled()": False,
        "torch.is_autocast_enabled('cpu')": False,
        "torch.is_anomaly_enabled()": False,
        "torch.get_float32_matmul_precision()": "highest",
        "the number of function modes": 0,
    }


def undo(name: Setting, value: Any, torch: types.ModuleType | None) -> None:
    """Give the setting *name* its former *value*. One that cannot be set is left as it is."""
    if name in _SET:
        _SET[name](value)
    elif name.startswith("the handler of "):
        signal.signal(signal.Signals[name.rpartition(" ")[2]], value)
    elif torch is not None and (set_it := _setters_of_torch(torch).get(name)):
        set_it(value)


def _set_filters(value: list[Any]) -> None:
    left_out = [each for each in warnings.filters if "numpy" in str(each)]
    warnings.resetwarnings()  # which makes warnings forget what it has looked up, as nothing else public does
    warnings.filters[:] = left_out + value  # type: ignore[index]


def _set_builtin_names(value: list[str]) -> None:
    for name in set(vars(builtins)) - {"_", *value}:
        delattr(builtins, name)


_SET: dict[Setting, Callable[[Any], object]] = {
    "random's state": random.setstate,
    "warnings.filters": _set_filters,
    "sys.path": partial(sys.path.__setitem__, slice(None)),
    "sys.excepthook": partial(setattr, sys, "excepthook"),
    "sys.gettrace()": sys.settrace,
    "sys.getrecursionlimit()": sys.setrecursionlimit,
    "sys.getswitchinterval()": sys.setswitchinterval,
    "threading.excepthook": partial(setattr, threading, "excepthook"),
    "gc.isenabled()": lambda value: gc.enable() if value else gc.disable(),
    "gc.get_threshold()": lambda value: gc.set_threshold(*value),
    "the locale": partial(locale.setlocale, locale.LC_ALL),
    "the working directory": os.chdir,
    "the names in builtins": _set_builtin_names,
    "the root logger's level": logging.getLogger().setLevel,
    "the root logger's handlers": partial(logging.getLogger().handlers.__setitem__, slice(None)),
    "what logging.disable() disables": logging.disable,
}


def _setters_of_torch(torch: types.ModuleType) -> dict[Setting, Callable[[Any], object]]:
    from ..torch_private import set_default_device  # not before torch is imported

    backends = torch.backends
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled
    return {
        "the default dtype": torch.set_default_dtype,
        "the default device": set_default_device,
        "torch.is_grad_enabled()": torch.set_grad_enabled,
        "torch.are_deterministic_algorithms_enabled()": (
            lambda value: torch.use_deterministic_algorithms(value, warn_only=warn_only())
        ),
        "torch.is_deterministic_algorithms_warn_only_enabled()": (
            lambda value: torch.use_deterministic_algorithms(
                torch.are_deterministic_algorithms_enabled(), warn_only=value
            )
        ),
        "torch.get_num_threads()": torch.set_num_threads,
        "torch.get_float32_matmul_precision()": torch.set_float32_matmul_precision,
        "torch.is_autocast_enabled('cpu')": partial(torch.set_autocast_enabled, "cpu"),
        "torch.get_autocast_dtype('cpu')": partial(torch.set_autocast_dtype, "cpu"),
        "torch.is_autocast_cache_enabled()": torch.set_autocast_cache_enabled,
        "torch.is_anomaly_enabled()": torch.autograd.set_detect_anomaly,
        "torch.backends.cudnn.enabled": partial(setattr, backends.cudnn, "enabled"),
        "torch.backends.cudnn.benchmark": partial(setattr, backends.cudnn, "benchmark"),
        "torch.backends.cudnn.deterministic": partial(setattr, backends.cudnn, "deterministic"),
        "torch.backends.cuda.flash_sdp_enabled()": backends.cuda.enable_flash_sdp,
        "torch.backends.cuda.math_sdp_enabled()": backends.cuda.enable_math_sdp,
        "torch.backends.cuda.mem_efficient_sdp_enabled()": backends.cuda.enable_mem_efficient_sdp,
        "whether torch flushes denormal numbers": torch.set_flush_denormal,
        "torch's random state": lambda value: torch.set_rng_state(torch.tensor(list(value), dtype=torch.uint8)),
    }
