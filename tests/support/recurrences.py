"""The recurrences of linear attention and state spaces, one row each, for the tests in tests/recurrences."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug import BaseKernel, KernelManager
from fuseplug_verify import Tolerance

from . import backends
from .managers import manager_of

BF16, HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Recurrence:
    """One recurrence. The mappings are arguments by name, of its function or of *tensors*.

    Attributes:
        op: Its name, which is also that of its function.
        tensors: Makes the function's arguments in one dtype, and some of them, such as decays, in another.
        tolerance: The recogniser's tolerance.
        how: The other arguments of the function.
        others: Alternatives to *how*.
        shapes: Less than a chunk, one token, one chunk, a chunk and a token, several chunks.
        long: More than a chunk, with few channels.
        tiny: For derivatives by finite differences.
        short: One chunk, one part, one token: sizes at which something may not have been copied.
        step: One token.
        empty: No tokens, and no sequences.
        optional: Arguments that may be missing.
        two: Two arguments that have values for every token.
        wanted: Groups of arguments whose gradients alone are wanted.
        decay: The argument that has the decays, and an index of some of its elements.
        kept: Arguments of *tensors*, and the shapes of the tensors that the backward keeps besides the arguments.
        npu: Whether it has a kernel for NPUs.
    """

    op: str
    tensors: Callable[..., dict[str, Tensor]]
    tolerance: Tolerance
    how: Mapping[str, Any]
    others: Sequence[Mapping[str, Any]]
    shapes: Sequence[Mapping[str, Any]]
    long: Mapping[str, Any]
    tiny: Mapping[str, Any]
    short: Sequence[Mapping[str, Any]]
    step: Mapping[str, Any]
    empty: Sequence[Mapping[str, Any]]
    optional: Sequence[str]
    two: tuple[str, str]
    wanted: Sequence[tuple[str, ...]]
    decay: tuple[str, Any]
    kept: tuple[Mapping[str, Any], Sequence[tuple[int, ...]]]
    npu: bool = field(default=False, kw_only=True)

    def both(self, kernel: ModuleType, **how: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The function of the module *kernel*, and the reference, with the arguments *how*, or else the row's."""
        reference = importlib.import_module(f"fuseplug_{self.op}.reference")
        ours, theirs = (functools.partial(getattr(m, self.op), **how or self.how) for m in (kernel, reference))
        return ours, theirs


def rows() -> dict[str, Recurrence]:
    """The recurrences that the chosen backend computes, by name."""
    from . import delta_rules, scans, ssd

    every = {"selective_scan": scans.ROW, "ssd": ssd.ROW, **delta_rules.ROWS}
    has = {"inductor": every, "npu": {name: row for name, row in every.items() if row.npu}}
    return has.get(backends.NAME, {})


def reference_manager(*ops: str) -> KernelManager:
    """A manager with references as kernels, to test, say, what is recognised without computing in chunks."""

    def kernel(op: str) -> type[BaseKernel]:
        kernels = importlib.import_module(f"fuseplug_{op}.kernels")
        base: type[BaseKernel] = getattr(kernels, kernels.__all__[0])
        own = {"kernel_id": f"reference_{op}", "function": base.reference, "check_sizes": (1 << 7,)}
        return type("Reference", (base,), own)

    return manager_of(*map(kernel, ops))


def assert_left_alone(manager: KernelManager, module: nn.Module, why: str) -> None:
    """Assert that nothing of *module* is fused, and that the report says *why*."""
    report = manager.plan(module).report
    assert not report.fused, report
    assert why in "; ".join(entry.why_not for entry in report.left_alone), report


def assert_given_as_asked(
    manager: KernelManager, module: nn.Module, arguments: Sequence[Any], hows: Sequence[Mapping[str, Any]]
) -> None:
    """Assert that the kernel computes *module* with each of *hows*, with the original's values and strides."""
    expected = [module(*arguments, **how) for how in hows]
    with manager.apply_all(module) as applied:
        for how, before in zip(hows, expected, strict=True):
            result = module(*arguments, **how)
            torch.testing.assert_close(result, before, rtol=1e-4, atol=1e-5)
            strides = [[t.stride() for t in ([r] if isinstance(r, Tensor) else r)] for r in (result, before)]
            assert strides[0] == strides[1]
        assert [(count.fused, count.original) for count in applied.calls()] == [(len(hows), 0)]
