"""The backend on which the tests of the ops run. Each process has one: see `chosen`."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fuseplug import KernelManager, Report
    from fuseplug_verify import Tolerance

NAMES = ("inductor", "triton", "npu")
SHARED = ("test_numbers.py", "test_applying.py")
"""The tests for every backend; those for one are in ``test_<backend>.py``, and other files are about no backend."""

NAME = "inductor"
"""The chosen backend, once pytest is configured: test modules choose their parameters by it."""


def chosen(config: pytest.Config) -> str:
    """The backend asked for; by default the NPU if one is in host memory, Triton if interpreted, or else Inductor."""
    asked: str | None = config.getoption("--backend")
    if asked:
        return asked
    if config.getoption("--fuseplug-host-npu", default=False):
        return "npu"
    return "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "inductor"


def is_for_another(path: Path) -> bool:
    """Whether *path*, in the folder of an op, has no test for the chosen backend."""
    if not (path.parent / SHARED[0]).exists() or not path.name.startswith("test_"):
        return False
    if path.name in (*SHARED, f"test_{NAME}.py"):
        return False
    return NAME != "inductor" or path.name in {f"test_{name}.py" for name in NAMES}


class Backend:
    """One backend: how its kernels are called, and what they have launched.

    Attributes:
        name: One of `NAMES`.
        device: The device type of its tensors.
        differentiable_twice: Whether its kernels have second derivatives.
    """

    def __init__(self, name: str, device: str, patch: pytest.MonkeyPatch) -> None:
        self.name, self.device, self._patch = name, device, patch
        self.differentiable_twice = name != "npu"
        self.order: list[str] = []
        """The names of the launched kernels, in order; always empty on an NPU."""

    @property
    def launches(self) -> Counter[str]:
        """How often each kernel was launched since the last `clear`."""
        return Counter(self.order)

    def clear(self) -> None:
        """Forget what was launched."""
        self.order.clear()

    def module(self, op: str) -> ModuleType:
        """The Python module with its functions for *op*, whose launches are counted from here on."""
        return importlib.import_module(f"fuseplug_{op}.backends.{self.name}")

    def on(self, tensors: Mapping[str, Any], *wanted: str) -> dict[str, Any]:
        """Copies of *tensors* on the device; those named in *wanted* require gradients."""
        return {
            name: t.detach().to(self.device, copy=True).requires_grad_(name in wanted) for name, t in tensors.items()
        }

    def assert_right(
        self, ours: Callable[..., Any], theirs: Callable[..., Any], tensors: Mapping[str, Tensor], tolerance: Tolerance
    ) -> None:
        """Assert that *ours* on the device is within *tolerance*, or within twice the error of *theirs*, of float64."""
        import torch

        from .judging import outcome

        result = outcome(ours, tensors, self.device)
        missing = [name for name, value in result.values.items() if value is None]
        assert not missing, f"no {', '.join(missing)}"
        why = tolerance.excess(result, outcome(theirs, tensors), outcome(theirs, tensors, dtype=torch.float64))
        assert not why, why

    def assert_fused_and_undone(self, op: str, module: nn.Module, hidden: Tensor) -> Report:
        """Assert that *module* computes the same with the kernel for *op*, and the same bits after undo.

        The kernel also computes a training call under autocast. Returns the report of what was fused.
        """
        import torch

        module, hidden = module.to(self.device), hidden.to(self.device)
        before = module(hidden)
        with self.manager(op).apply_all(module) as applied:
            torch.testing.assert_close(module(hidden), before, rtol=1e-4, atol=1e-5)
            with torch.autocast(self.device, torch.bfloat16):
                module(hidden).sum().backward()
            assert [(count.fused, count.original) for count in applied.calls()] == [(2, 0)], applied.report
        assert torch.equal(module(hidden), before)
        return applied.report

    def manager(self, op: str) -> KernelManager:
        """A manager that has only this backend's kernel for *op*."""
        from fuseplug import KernelManager

        return KernelManager(environ={"FUSEPLUG_KERNELS": f"{self.name}_fused_{op}"})


class _Inductor(Backend):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__("inductor", "cpu", patch)
        from fuseplug_backends.inductor import Program

        run = Program.__call__

        def call(program: Program, *tensors: Tensor) -> Any:
            self.order.append("program")
            return run(program, *tensors)

        patch.setattr(Program, "__call__", call)


class _Triton(Backend):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import torch

        from fuseplug_backends.triton.kernel import interpreted

        if not torch.cuda.is_available() and not interpreted():
            pytest.exit("there is no GPU here: set TRITON_INTERPRET=1", returncode=4)
        super().__init__("triton", "cuda" if torch.cuda.is_available() else "cpu", patch)

    def module(self, op: str) -> ModuleType:
        from fuseplug_backends.triton import Operation

        module = super().module(op)
        below = [each for name, each in sys.modules.items() if name.startswith(module.__name__)]
        operations = {
            id(value): (name, value)
            for each in below
            for name, value in vars(each).items()
            if isinstance(value, Operation)
        }
        for name, operation in operations.values():
            self._patch.setattr(operation, "launch", self._spy(name, operation.launch))
        return module

    def _spy(self, name: str, launch: Callable[..., None]) -> Callable[..., None]:
        def spied(*arguments: Any) -> None:
            self.order.append(name)
            launch(*arguments)

        return spied


class _NPU(Backend):
    def __init__(self, patch: pytest.MonkeyPatch, host: Any) -> None:
        super().__init__("npu", "npu", patch)
        from fuseplug_backends.npu import here

        # Otherwise the call that finds this out would count in the first test.
        patch.setitem(here._KNOWN, "npu_clipped_swiglu", True)
        self.host = host

    @property
    def launches(self) -> Counter[str]:
        return Counter({name: n for name, n in self.host.calls.items() if "::" not in name})

    def clear(self) -> None:
        self.host.calls.clear()


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The chosen backend, on its device; for Triton, memory that no kernel writes holds NaN."""
    if NAME == "npu":
        return _NPU(monkeypatch, request.getfixturevalue("host_npu"))
    if NAME == "inductor":
        return _Inductor(monkeypatch)
    request.getfixturevalue("rounding_as_gpus_do")
    request.getfixturevalue("poisoned")
    return _Triton(monkeypatch)


@pytest.fixture
def fake_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """The chosen backend, while tensors of its device have shapes and dtypes, but no values."""
    if NAME == "npu":
        npu = request.getfixturevalue("fake_npu")
        yield _NPU(monkeypatch, npu)
        return
    from torch._subclasses import FakeTensorMode

    backend = _Inductor(monkeypatch) if NAME == "inductor" else _Triton(monkeypatch)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield backend
    assert not backend.order


OPS = (
    *("rmsnorm", "swiglu", "rope", "moe", "linear_cross_entropy"),
    *("causal_conv1d", "gated_delta_rule", "selective_scan", "ssd"),
)


@pytest.fixture
def small_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check kernels only at the smallest of their sizes, because each larger one takes seconds."""
    for op in OPS:
        for kernel in vars(importlib.import_module(f"fuseplug_{op}.kernels")).values():
            if isinstance(kernel, type) and hasattr(kernel, "check_sizes"):
                monkeypatch.setattr(kernel, "check_sizes", kernel.check_sizes[:1])


@pytest.fixture(scope="session")
def rounding_as_gpus_do() -> Iterator[None]:
    """Make the interpreter round to nearest, from here on."""
    from fuseplug_testing.triton import rounding_to_nearest

    with rounding_to_nearest():
        yield


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill memory with NaN until it is written."""
    import torch

    deterministic = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    with contextlib.ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, before[0])
        stack.callback(setattr, deterministic, "fill_uninitialized_memory", before[1])
        torch.use_deterministic_algorithms(True, warn_only=True)  # which fills memory, and only warns of cuBLAS
        deterministic.fill_uninitialized_memory = True
        yield
