"""What is specific to gated MLPs in Triton: one launch each way, what is read where, and what is not written."""

import inspect
import math
import re

import pytest
import torch
from support.gates import BF16, EVERY_LAYOUT, INNER, TOLERANCE, both, options, tensors
from support.thorough import few_on
from torch import nn

from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.triton import FORMULAS
from fuseplug_backends.triton.activations import activate
from fuseplug_swiglu import reference
from fuseplug_swiglu.backends import triton
from fuseplug_swiglu.backends.triton import launches, swiglu
from fuseplug_swiglu.reference import VARIANTS

BOTH = ["gated", "gated_backward"]


@pytest.fixture(autouse=True)
def _counted(backend):
    backend.module("swiglu")


def test_the_formulas_that_are_served_are_those_of_the_program():
    assert set(re.findall(r'FORMULA == "(\w+)"', inspect.getsource(activate.fn))) == FORMULAS


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_way_is_one_launch(backend, variant):
    arguments = backend.on(tensors(), "gate", "up")
    swiglu(**arguments, **options(variant=variant)).sum().backward()
    assert backend.order == BOTH


@pytest.mark.parametrize("shape", [(1, 1100), (2, 1024)], ids=str)
@pytest.mark.parametrize("layout", few_on("triton", EVERY_LAYOUT, 2))
def test_several_programs_a_row(backend, layout, shape):
    functions = both(triton, **options("gelu", layout=layout))
    backend.assert_right(*functions, tensors(layout, shape=shape), TOLERANCE["triton"])


def test_rows_of_one_stride_are_read_where_they_are(backend):
    gate_up = torch.randn(2, 3, 24, device=backend.device)
    gate, up = gate_up.chunk(2, dim=-1)
    rows = [launches._rows(x) for x in (gate, up, gate_up, gate_up[:, :1, 4:12], gate_up[:1, :1].expand(4, 3, -1))]
    assert [stride for _, stride in rows] == [24, 24, 24, 72, 0]
    assert [x.data_ptr() - gate_up.data_ptr() for x, _ in rows] == [0, 12 * 4, 0, 4 * 4, 0]


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_nothing_is_written_beyond_the_results(backend, monkeypatch, layout):
    guards = []

    def guarded(results):
        def make(*arguments):
            given = results(*arguments)
            several = given if isinstance(given, list) else [given]
            memory = [torch.full((t.numel() + 64,), math.pi, dtype=t.dtype, device=backend.device) for t in several]
            guards.extend(whole[t.numel() :] for whole, t in zip(memory, several, strict=True))
            inside = [whole[: t.numel()].view(t.shape) for whole, t in zip(memory, several, strict=True)]
            return inside if isinstance(given, list) else inside[0]

        return make

    for operation in (launches.gated, launches.gated_backward):
        monkeypatch.setattr(operation, "results", guarded(operation.results))
    backend.assert_right(*both(triton, **options(layout=layout)), tensors(layout), TOLERANCE["triton"])
    assert len(guards) == (3 if layout is None else 2)
    assert all((guard == math.pi).all() for guard in guards)


@pytest.mark.parametrize("layout", [None, "gate-first", "interleaved"])
def test_rows_may_be_further_apart_than_32_bits_reach(backend, monkeypatch, layout):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    wide = torch.empty((17 << 27) + 64, dtype=BF16, device=backend.device)  # only 17 rows of 40 elements are touched
    gate = wide.as_strided((17, 2 * INNER if layout else INNER), (1 << 27, 1))
    up = None if layout else wide.as_strided((17, INNER), (1 << 27, 1), 32)
    for tensor in (gate, up):
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape))
    how = {} if layout is None else {"layout": layout}
    torch.testing.assert_close(swiglu(gate, up, **how), reference.swiglu(gate, up, **how), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("variant", ["plain", "clamp-before-offset"])
@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_only_the_gradients_that_are_needed_are_written(backend, monkeypatch, wanted, variant):
    program, written = launches.programs.backward, []

    class Recording:
        def __getitem__(self, grid):
            return lambda *given, **constants: written.append(given[:2]) or program[grid](*given, **constants)

    monkeypatch.setattr(launches.programs, "backward", Recording())
    swiglu(**backend.on(tensors(), wanted), **options("gelu", variant)).sum().backward()
    assert [[t is not None for t in results] for results in written] == [[wanted == "gate", wanted == "up"]]


def test_the_gradient_of_gate_and_up_in_one_is_one_tensor(backend, monkeypatch):
    written = []
    launch = launches.gated_backward.launch
    monkeypatch.setattr(launches.gated_backward, "launch", lambda *given: written.extend(given[0]) or launch(*given))
    gate_up = backend.on(tensors("gate-first"), "gate")["gate"]
    (gradient,) = torch.autograd.grad(swiglu(gate_up).sum(), gate_up)
    assert [t.data_ptr() for t in written] == [gradient.data_ptr()]
    assert gradient.shape == gate_up.shape


@pytest.mark.parametrize("activation", [name for name, row in ACTIVATIONS.items() if row.formula in FORMULAS])
def test_large_gates_have_exact_gradients(backend, activation):
    # relu2 of 1e30 is infinite in float32; nothing else is.
    sizes = (1e2, 1e4) if activation == "relu2" else (1e2, 1e4, 1e30)
    gate = torch.tensor([sign * size for size in sizes for sign in (1, -1)], device=backend.device)
    up = torch.full_like(gate, 0.5)
    ours = [t.requires_grad_() for t in (gate.clone(), up.clone())]
    exact = [t.double().requires_grad_() for t in (gate, up)]
    y, truth = swiglu(*ours, activation=activation), reference.swiglu(*exact, activation=activation)
    gradients, true = torch.autograd.grad(y.sum(), ours), torch.autograd.grad(truth.sum(), exact)
    for value, expected in zip((y, *gradients), (truth, *true), strict=True):
        torch.testing.assert_close(value.double(), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_new", "relu2"])
def test_what_autocast_would_widen_is_the_reference(backend, activation):
    arguments = backend.on(tensors(dtype=BF16))
    with torch.autocast(backend.device, dtype=BF16):
        swiglu(**arguments, activation=activation)
    assert backend.order == ([] if ACTIVATIONS[activation].autocast else ["gated"])


def test_subclasses_and_tracers_see_the_reference(backend):
    class Own(torch.Tensor):
        pass

    gate, up = backend.on(tensors()).values()
    assert type(swiglu(gate.as_subclass(Own), up.as_subclass(Own))) is Own
    traced = torch.jit.trace(swiglu, (gate, up), check_trace=False)
    torch.testing.assert_close(traced(gate, up), reference.swiglu(gate, up))
    assert backend.order == []


@pytest.mark.parametrize("how", [options(), options("gelu", "clamp-after", "interleaved")], ids=str)
def test_one_graph_with_its_gradient_for_every_number_of_tokens(backend, how):
    torch.compiler.reset()
    ours, theirs = both(triton, **how)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 5):
        backend.clear()
        arguments = tensors(how.get("layout"), BF16, shape=(rows, INNER))
        backend.assert_right(compiled, theirs, arguments, TOLERANCE["triton"])
        assert backend.order == BOTH


@pytest.mark.parametrize("layout", few_on("triton", EVERY_LAYOUT, 2))
def test_export(backend, layout):
    class Module(nn.Module):
        def forward(self, gate, up):
            return swiglu(gate, up, **options(layout=layout))

    arguments = list(backend.on(tensors(layout, shape=(4, INNER))).values())
    inputs = (*arguments, None) if layout else tuple(arguments)
    rows = {0: torch.export.Dim("rows")}
    exported = torch.export.export(Module(), inputs, dynamic_shapes=(rows, None if layout else rows))
    assert "fuseplug_swiglu.gated.default" in str(exported.graph)
    inputs = tuple(None if t is None else t[:3] for t in inputs)
    torch.testing.assert_close(exported.module()(*inputs), reference.swiglu(*inputs, **options(layout=layout)))
    assert backend.order == ["gated"]


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_the_operations_pass_the_checks_of_torch(backend, layout):
    arguments = list(backend.on(tensors(layout)).values())
    pair, constants = (
        (arguments[0], arguments[1] if len(arguments) > 1 else None),
        ("silu", "clamp-after", layout or ""),
    )
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(launches.gated.op, (*pair, *constants, 0.5, None, 1.0), test_utils=checks)
    dy = torch.randn(2, 3, INNER, device=backend.device)
    for wanted in [(True, True), (True, False), (False, True)] if layout is None else [(True, False)]:
        arguments = (dy, *pair, *wanted, *constants, 0.5, None, 1.0)
        torch.library.opcheck(launches.gated_backward.op, arguments, test_utils=checks)
