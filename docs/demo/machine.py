"""The machine on which the numbers were measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers


def facts() -> dict[str, str | int]:
    return {
        "cpu": _cpu(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def line() -> str:
    return "{cpu} ({instructions}), {cores} cores, torch {torch}, transformers {transformers}".format(**facts())


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for entry in info.read_text().splitlines():
            key, _, value = entry.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
