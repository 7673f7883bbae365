"""Finding a kernel by the name of its class, without loading the others; and other names of LLaMA-Factory's kernels."""

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
"""LLaMA-Factory's functions that are called in the same way here, by where they are."""

INSTEAD = dict.fromkeys(
    ("NpuMoeFused", "Qwen3NpuMoeFused", "kernel_moe_mapping"),
    "; forwards are not put on by hand: apply_kernel('npu_fused_moe', model=model)",
) | {
    "HybridGmmFunction": "; fuseplug_moe.backends.npu.HybridGmmFunction takes other arguments than LLaMA-Factory's",
    "default_kernels": "; scan_all_kernels() gives them",
}
"""What takes the place of others, whose form is bound to how LLaMA-Factory patches: the end of an error."""


def class_named(name: str, records: Sequence[KernelRecord]) -> type[BaseKernel] | None:
    """The class *name* of one of the kernels of *records*, which may be off or lack its extra; ``None`` if none has it.

    Raises:
        DiscoveryError: If several kernels have a class of this name, or the one that has it cannot be loaded.
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
    """The class names of the kernels that are ready, without those that several kernels have."""
    ready = {type(record.kernel).__name__ for record in records if record.kernel}
    return sorted(name for name in ready if len(_named(name, records)) == 1)


def _named(name: str, records: Sequence[KernelRecord]) -> list[KernelRecord]:
    named = [record for record in records if _class_name(record) == name]
    # Whoever turns a kernel off settles whose name it is, and so does whoever has the id.
    return [record for record in named if record.state not in ("off", "not allowed", "conflict")] or named


def _class_name(record: KernelRecord) -> str:
    if record.kernel:
        return type(record.kernel).__name__
    # Of a kernel that is not loaded, "package.module:Class [extra]" is known.
    return re.split(r"[:.]", record.value.partition("[")[0].strip())[-1]
