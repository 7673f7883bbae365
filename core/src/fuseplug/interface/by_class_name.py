"""Finds a kernel by its class name without loading the others, and lists other names of LLaMA-Factory's kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..discovery import kernel_of
from ..discovery.records import KernelRecord
from ..discovery.selecting import KERNELS_VARIABLE
from ..errors import DiscoveryError
from ..hookspecs import BaseKernel

FUNCTIONS = {
    "GmmFunction": "fuseplug_moe.backends.npu:GmmFunction",
    "npu_swiglu_forward": "fuseplug_swiglu.backends.npu:npu_swiglu_forward",
}
"""Functions of LLaMA-Factory that are called in the same way here: where each is, by name."""

INSTEAD = dict.fromkeys(
    ("NpuMoeFused", "Qwen3NpuMoeFused", "kernel_moe_mapping"),
    "; Fuseplug replaces forwards itself: apply_kernel('npu_fused_moe', model=model)",
) | {
    "HybridGmmFunction": "; fuseplug_moe.backends.npu.HybridGmmFunction takes other arguments than LLaMA-Factory's",
    "default_kernels": "; scan_all_kernels() gives them",
}
"""For names that fit only LLaMA-Factory's way of patching: the end of an error, which says what to use instead."""


def class_named(name: str, records: Sequence[KernelRecord]) -> type[BaseKernel] | None:
    """The class *name* of a kernel of *records*, even if it is off or lacks its extra; ``None`` if no kernel has it.

    Raises:
        DiscoveryError: If several kernels have a class of this name, or the only one that has it cannot be loaded.
    """
    named = _named(name, records)
    if not named:
        return None
    first, *others = named
    if others:
        exclude = ",".join(f"-{record.name}" for record in others)
        raise DiscoveryError(
            f"{name} is the class name of the kernels {' and '.join(record.name for record in named)}: get the one you "
            f"want by its id, or choose {first.name} with {KERNELS_VARIABLE}={exclude}",
            records=named,
        )
    kernel = kernel_of(first)
    if kernel is None:
        raise DiscoveryError(
            f"{name} cannot be imported: kernel {first.name} is {first.condition}: {first.reason}", record=first
        )
    return type(kernel)


def ready_names(records: Sequence[KernelRecord]) -> list[str]:
    """The class names of the kernels that are ready, without names that several kernels have."""
    ready = {type(record.kernel).__name__ for record in records if record.kernel}
    return sorted(name for name in ready if len(_named(name, records)) == 1)


def _named(name: str, records: Sequence[KernelRecord]) -> list[KernelRecord]:
    named = [record for record in records if _class_name(record) == name]
    # A kernel that is off, not allowed or in conflict leaves the name to the others, if there are any.
    return [record for record in named if record.state not in ("off", "not allowed", "conflict")] or named


def _class_name(record: KernelRecord) -> str:
    if record.kernel:
        return type(record.kernel).__name__
    # The entry point of a kernel that is not loaded names its class: "package.module:Class [extra]".
    return re.split(r"[:.]", record.value.partition("[")[0].strip())[-1]
