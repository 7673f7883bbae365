"""The options of ``fuseplug run``, which its processes hand on in an environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fuseplug.contract import Mode

VARIABLE = "FUSEPLUG_RUN"
MODULES_VARIABLE = "FUSEPLUG_RUN_MODULES"
"""A separate variable, because every Python process reads it at its start, and importing `json` takes time."""

TRANSFORMERS = "transformers.modeling_utils"
ACCELERATE = "accelerate.accelerator"
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
LLAMA_FACTORY = "llamafactory.v1.plugins.model_plugins.kernels.interface"
MODULES = (TRANSFORMERS, ACCELERATE, FSDP1, LLAMA_FACTORY)
"""The modules in which functions are wrapped after the import."""


@dataclass(frozen=True)
class RunOptions:
    """The options of ``fuseplug run``.

    Attributes:
        mode: Whether to fuse models that are trained, or models that are called without gradients.
        include, exclude, only, skip, allow: As in `fuseplug.KernelManager.plan`.
        report: The file for the reports; ``None`` to write none.
        strict: Whether an error ends the run.
        dry_run: Whether to make plans without applying them.
    """

    mode: Mode = "training"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    report: str | None = None
    strict: bool = False
    dry_run: bool = False

    def to_environment(self) -> str:
        """The value of the variable `VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RunOptions:
        """The options that the variable `VARIABLE` holds."""
        options = json.loads(environ.get(VARIABLE, "{}"))
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in options.items()}
        return cls(**values)

    def for_plan(self) -> dict[str, Any]:
        """The keyword arguments of `fuseplug.KernelManager.plan`."""
        return {
            "include": self.include or None,
            "exclude": self.exclude,
            "only": self.only,
            "skip": self.skip,
            "allow": self.allow,
            "strict": self.strict,
            "mode": self.mode,
        }
