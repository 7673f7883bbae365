"""The checks by name, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from . import declaration, lazies, modules, numbers, own_calls, reads, returned, runs
from .results import Finding


@dataclass(frozen=True)
class Check:
    """One question about a kernel.

    Attributes:
        name: The name under which faults are reported.
        ask: Yields the findings. A check per kernel gets the `Examined`, a check per specimen the `Specimen`, a check
            per case each `Case`.
        per: What the check is about.
        runs: Whether the check runs the kernel, which needs the kernel's device.
        needs: The checks that must have passed on a specimen before this one has anything to say.
    """

    name: str
    ask: Callable[[Any], Iterator[Finding]]
    per: Literal["kernel", "specimen", "case"]
    runs: bool = True
    needs: tuple[str, ...] = ("specimens", "numbers")


CHECKS = (
    Check("declaration", declaration.declaration, "kernel", runs=False, needs=()),
    Check("import", declaration.imports, "kernel", runs=False, needs=()),
    Check("variants", declaration.variants, "kernel", runs=False, needs=()),
    Check("match", declaration.match, "specimen", runs=False, needs=()),
    Check("specimens", declaration.fuses, "specimen", runs=False, needs=()),
    Check("example", declaration.examples, "case", runs=False, needs=("specimens",)),
    Check("reads", reads.reads, "case", runs=False, needs=("specimens", "example")),
    Check("numbers", numbers.numbers, "case", needs=("specimens",)),
    Check("lazy", lazies.lazy, "case"),
    Check("own-call", own_calls.own_calls, "specimen"),
    Check("sizes", numbers.sizes, "case"),
    Check("shapes", numbers.shapes, "case"),
    Check("layouts", numbers.layouts, "case"),
    Check("results", returned.returned, "case"),
    Check("default-device", returned.default_device, "case"),
    Check("gradients", numbers.gradients, "case"),
    Check("double-backward", numbers.double_backward, "case"),
    Check("no-grad", numbers.no_grad, "case"),
    Check("special-values", numbers.special_values, "case"),
    Check("memory", runs.memory, "case"),
    Check("references", runs.references, "case"),
    Check("determinism", runs.determinism, "case"),
    Check("threads", runs.threads, "case"),
    Check("process-state", runs.process_state, "case"),
    Check("undo", modules.undo, "specimen"),
    Check("copies", modules.copies, "case"),
    Check("compile", modules.compiled, "case"),
    Check("checkpoint", modules.checkpointed, "case"),
    Check("in-place", modules.written_into, "case"),
    Check("autocast", modules.autocast, "case"),
    Check("casts", modules.casts, "case"),
)
