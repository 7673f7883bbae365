"""`fuseplug_backends.triton` turns a launch into an operation that compilers, exporters and fake tensors know."""

from __future__ import annotations

import contextlib
import math
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode

from fuseplug_backends.triton import Operation, TritonKernel, offsets_fit, operation, transparent

launched = []


@triton.jit
def _double(y, x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)


@operation("fuseplug_tests::double(Tensor x) -> Tensor", torch.empty_like)
def double(y, x):
    launched.append(x.numel())
    _double[(-(-x.numel() // 64),)](y, x, x.numel(), BLOCK=64)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return double(x)

    @staticmethod
    def backward(ctx, grad):
        return double(grad)


@pytest.fixture(autouse=True)
def nothing_launched():
    launched.clear()


def test_an_eager_call_launches(device, poisoned):
    x = torch.randn(100, device=device)
    assert torch.equal(double(x), 2 * x)
    assert launched == [100]


def test_threads_launch_at_once(device):
    given = [torch.randn(640, device=device) for _ in range(4)]
    found = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: double(given[n])})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], 2 * given[n]) for n in range(4))


def test_results_are_rounded_to_the_nearest(device):
    x = torch.cat([torch.randn(1000), torch.tensor([0.0, 1e-40, 3.4e38, math.inf, -math.inf, math.nan])]).to(device)
    y = torch.empty_like(x, dtype=torch.bfloat16)
    double.launch(y, x)
    assert torch.equal(y.nan_to_num(nan=7.0), (2 * x).bfloat16().nan_to_num(nan=7.0))


def test_the_operation_of_torch_computes_the_same(device):
    x = torch.randn(100, device=device)
    assert torch.equal(torch.ops.fuseplug_tests.double(x), 2 * x)
    assert launched == [100]


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiles_as_one_graph_with_its_gradient(device, backend):
    torch.compiler.reset()
    x = torch.randn(100, device=device, requires_grad=True)
    torch.compile(lambda x: Double.apply(x).sin(), fullgraph=True, backend=backend)(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).cos())
    assert launched == [100, 100]


def test_a_compiled_graph_knows_the_operation_by_name(device):
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    torch.compile(lambda x: double(x) + 1, fullgraph=True, backend=backend)(torch.randn(100, device=device))
    assert seen[0] == "fuseplug_tests.double.default"


def test_exports(device):
    class Module(torch.nn.Module):
        def forward(self, x):
            return double(x)

    x = torch.randn(100, device=device)
    program = torch.export.export(Module(), (x,))
    assert "fuseplug_tests.double.default" in str(program.graph)
    launched.clear()
    assert torch.equal(program.module()(x), 2 * x)
    assert launched == [100]


def test_fake_tensors_are_not_read(device):
    with FakeTensorMode():
        x = torch.randn(100, 3, device=device)
        y = double(x)
    assert (y.shape, y.device.type, launched) == (x.shape, device, [])


@pytest.mark.parametrize(("index", "switched"), [(None, []), (0, []), (1, [1])])
def test_the_current_device_is_that_of_the_first_tensor(monkeypatch, index, switched):
    """With one device, the test can only check what torch is asked to do for a tensor on another device."""
    seen = []

    @contextlib.contextmanager
    def device_index(number):
        seen.append(number)
        yield
        seen.append(None)

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    on_it = SimpleNamespace(device=SimpleNamespace(index=index))
    launch = Operation(
        f"fuseplug_tests::guarded_{index}(Tensor x) -> Tensor", lambda x: "result", lambda y, x: seen.append(y)
    )
    assert launch(on_it) == "result"
    assert seen == [*switched, "result", *(None for _ in switched)]


def test_meta_tensors_are_not_read():
    assert torch.ops.fuseplug_tests.double(torch.empty(5, device="meta")).shape == (5,)
    assert launched == []


def test_passes_the_checks_of_torch(device):
    torch.library.opcheck(double.op, (torch.randn(100, device=device),))


@pytest.mark.parametrize(
    ("shape", "stride", "dims", "fits"),
    [
        ((128, 4096, 4096), (1 << 24, 4096, 1), 2, True),
        ((128, 4096, 4096), (1, 128, 128 << 12), 2, True),  # fits by 128 elements
        ((129, 4096, 4096), (1, 129, 129 << 12), 2, False),
        ((2, 2), (1 << 31, 1), 2, False),
        ((2, 2), (1 << 31, 1), 1, True),
        ((2, 2), ((1 << 31) - 2, 1), 2, True),
        ((1, 5), (1 << 40, 1), 2, True),  # a dimension of size 1 takes no second step
        (((1 << 31) + 1,), (0,), 1, False),  # a copy has all of its elements in memory
    ],
    ids=str,
)
def test_how_far_32_bits_reach(shape, stride, dims, fits):
    assert offsets_fit(torch.empty_strided(shape, stride, device="meta"), dims) == fits


class TestTransparent:
    def test_plain_tensors_of_one_device(self, device):
        x = torch.randn(2, device=device)
        assert transparent(x, None, torch.nn.Parameter(x))
        assert not transparent(x, torch.empty(2, device="meta"))

    def test_transforms_and_tracers_see_the_operations_themselves(self):
        seen = []

        def look(x):
            seen.append(transparent(x))
            return x * 1

        x = torch.randn(2)
        torch.func.grad(lambda x: look(x).sum())(x)
        torch.func.vmap(look)(x)
        torch.func.jvp(look, (x,), (x,))
        torch.jit.trace(look, (x,), check_trace=False)
        assert seen == [False] * 4

    def test_a_batch_of_gradients_is_no_tensor_to_read(self):
        seen = []
        x = torch.randn(2, requires_grad=True)
        y = x * 1
        y.register_hook(lambda grad: seen.append(transparent(grad)))
        torch.autograd.grad(y, x, torch.randn(3, 2), is_grads_batched=True)
        assert seen == [False]

    def test_subclasses_keep_their_own(self):
        class Own(torch.Tensor):
            pass

        assert not transparent(torch.randn(2).as_subclass(Own))


class TestTheKernel:
    def test_the_interpreter_makes_the_cpu_one_of_its_devices(self, device):
        assert ("cpu" in TritonKernel.device_types) == (device == "cpu")
        assert {"cuda", "xpu"} <= set(TritonKernel.device_types)
