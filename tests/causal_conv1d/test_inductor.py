"""Inductor's programs for causal convolutions are right, and are compiled only a handful of times."""

import pytest
import torch
from support.causal_convolutions import BF16, SINGLE, TOLERANCE, both, tensors
from support.recorded import uncompiled
from support.thorough import first_quick
from torch import nn

from fuseplug_backends.inductor import program
from fuseplug_causal_conv1d.backends import inductor
from fuseplug_causal_conv1d.kernels import InductorCausalConv1dKernel
from fuseplug_causal_conv1d.reference import VARIANTS
from fuseplug_causal_conv1d.reference import causal_conv1d as reference

pytestmark = pytest.mark.skipif(
    InductorCausalConv1dKernel().unavailable("cpu") is not None, reason="Inductor needs a C++ compiler"
)


@pytest.fixture
def ran(everything_compiled, backend):
    """The programs that are started, including those for small inputs."""
    return backend.order


@pytest.fixture
def traced(ran, monkeypatch):
    """Like `ran`, but records programs without compiling them to machine code."""
    monkeypatch.setattr(inductor, "_programs", {})
    monkeypatch.setattr(program, "compiled_by_inductor", uncompiled)
    return ran


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["silu", "identity"])
@pytest.mark.parametrize(
    ("dtypes", "seen"),
    [
        ((SINGLE, SINGLE), lambda x: x),
        ((BF16, BF16), lambda x: x),
        ((BF16, SINGLE), lambda x: x[:, :6]),
        ((SINGLE, SINGLE), torch.Tensor.contiguous),
        ((BF16, BF16), torch.Tensor.contiguous),
    ],
)
def test_values_and_gradients_are_right_compiled(ran, backend, variant, dtypes, seen):
    arguments = tensors(*dtypes, shape=(2, 12, 41))
    channels = seen(arguments["x"]).shape[1]
    arguments |= {name: arguments[name][:channels] for name in ("weight", "bias")}

    def look(function):
        return lambda x, weight, bias: function(seen(x), weight, bias)

    backend.assert_right(*map(look, both(inductor, variant)), arguments, TOLERANCE)
    assert len(ran) == (3 if variant == "silu" else 2)


@pytest.mark.parametrize("layout", first_quick(["tokens", "channels"]))
def test_as_few_programs_serve_all_sizes(traced, layout):
    for batch, length in [(4, 6), (2, 5), (3, 40), (7, 300)]:
        arguments = tensors(shape=(batch, 6, length), bias=False)
        if layout == "tokens":
            arguments["x"] = arguments["x"].contiguous()
        leaves = {name: t.requires_grad_() for name, t in arguments.items()}
        y = inductor.causal_conv1d(**leaves)
        torch.testing.assert_close(y, reference(**arguments))
        torch.autograd.grad(y.square().sum(), list(leaves.values()))
    assert [each.compilations for each in inductor._programs.values()] == [1, 1, 1]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", ["tokens", "channels"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_backward_of_several_windows_is_that_of_the_whole(traced, backend, monkeypatch, variant, layout, batch):
    monkeypatch.setattr(inductor, "_WINDOW", batch * 6 * 64)
    arguments = tensors(shape=(batch, 6, 150))
    if layout == "tokens":
        arguments["x"] = arguments["x"].contiguous()
    backend.assert_right(*both(inductor, variant), arguments, TOLERANCE)
    assert [each.compilations for each in inductor._programs.values()] == [1] * (3 if variant == "silu" else 2)


@pytest.mark.thorough
def test_what_was_compiled_for_one_size_is_right_for_others(ran, backend):
    """Inductor's cache once gave a program for one block of tokens to calls with more."""
    for batch, length in [(2, 22), (2, 43), (1, 5), (3, 300), (2, 32)]:
        arguments = tensors(shape=(batch, 6, length), bias=False)
        torch.full((1 << 16,), 1e30)  # so that freed memory does not hold zeros
        backend.assert_right(*both(inductor), arguments, TOLERANCE)
    assert ran


@pytest.mark.parametrize(
    ("seen", "in_place"),
    [
        (lambda x: x, True),
        (lambda x: x[:, 3:7], True),
        (lambda x: x[:1, 3:7], True),
        (lambda x: x[:, :, 3:], False),
        (lambda x: x[:, ::2], False),
        (lambda x: x[:, :, :1].expand(-1, -1, 9), False),
    ],
)
def test_rows_are_read_in_place_and_other_layouts_are_copied(seen, in_place):
    rows = seen(tensors()["x"]).transpose(1, 2)
    dense = inductor._dense(inductor._Form(VARIANTS["silu"], 1), rows)
    assert (dense.data_ptr() == rows.data_ptr()) == in_place
    assert torch.equal(dense, rows)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_exports_and_traces(ran):
    class Convolves(nn.Module):
        def forward(self, x, weight, bias):
            return inductor.causal_conv1d(x, weight, bias)

    arguments = tuple(tensors().values())
    exported = torch.export.export(Convolves(), arguments).module()
    for function in (exported, torch.jit.trace(Convolves(), arguments, check_trace=False)):
        torch.testing.assert_close(function(*arguments), reference(*arguments))
    assert not ran
