"""The original computes calls that are too small to gain, or that something traces."""

import dataclasses
import sys

import pytest
import torch
from support import models
from support.kernels import NormKernel, quiet_norm, ran, variant_of
from support.managers import manager_of
from support.transforms import TRANSFORMS
from torch.utils.flop_counter import FlopCounterMode

from fuseplug import Use, torch_private

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(autouse=True)
def _as_users_call(monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")


class Norm(models.Norm):
    def __init__(self, dtype=torch.float32):
        super().__init__(8)
        self.to(dtype)


def fused(gains=lambda self, use: 64, module=None, **options):
    module = module or Norm()
    kernel = variant_of(NormKernel, gains_from=gains)
    applied = manager_of(kernel).apply_all(module, **options)
    assert applied.report.fused, applied.report
    ran.clear()
    return module, applied


def rows(number, dtype=torch.float32, *, gradients=False):
    return torch.randn(number, 8, dtype=dtype).requires_grad_(gradients)


def test_a_small_call_has_the_bits_of_the_original_and_a_large_one_is_the_kernels():
    module, applied = fused()
    x = rows(7)
    assert torch.equal(module(x), Norm()(x))
    assert ran["norm"] == 0
    module(rows(8))
    assert ran["norm"] == 1
    assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 1)]


def by_dtype_and_gradients(self, use):
    assert isinstance(use, Use)
    assert (use.device_type, use.adapter.variant) == ("cpu", "llama")
    return 32 * (1 + use.gradients) * (1 + (use.dtype is torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_size_depends_on_dtype_and_gradients(dtype, gradients):
    module, _ = fused(by_dtype_and_gradients, Norm(dtype))
    least = 4 * (1 + gradients) * (1 + (dtype is torch.float32))
    module(rows(least - 1, dtype, gradients=gradients))
    assert ran["norm"] == 0
    module(rows(least, dtype, gradients=gradients))
    assert ran["norm"] == 1


def test_it_is_counted_in_what_the_op_works_on():
    class Wide(NormKernel):
        kernel_id = "wide_norm"

        def gains_from(self, use):
            return 100

        def match(self, site):
            found = super().match(site)
            return found and [dataclasses.replace(each, work=3.0) for each in found]

    module = Norm()
    applied = manager_of(Wide).apply_all(module)
    assert applied.report.fused[0].gains_from["bfloat16 training"] == 34
    ran.clear()
    module(rows(4))
    assert ran["norm"] == 0
    module(rows(5))
    assert ran["norm"] == 1


def test_a_batch_says_what_was_too_small():
    _, applied = fused()
    (calls,) = applied.try_(rows(2))
    assert calls.reasons == (
        "it is too small to gain: the main input has 16 elements, and the kernel is faster from 64 on",
    )


class TwoEnds(NormKernel):
    kernel_id = "two_ends_norm"

    def gains_from(self, use):
        return 64

    def gains_until(self, use):
        return 0 if use.gradients else 16


def test_a_kernel_may_gain_in_the_smallest_calls_too():
    module = Norm()
    applied = manager_of(TwoEnds).apply_all(module)
    for number, ours in {1: 1, 2: 1, 3: 0, 7: 0, 8: 1}.items():
        for _ in range(2):  # a module's first call passes the whole guard, which starts the count
            ran.clear()
            module(rows(number))
            assert ran["norm"] == ours, number
            module(rows(number, gradients=True))
            assert ran["norm"] == ours + (number == 8), number
    (calls,) = applied.try_(rows(3))
    assert calls.reasons == (
        "it is too small to gain: the main input has 24 elements, and the kernel is faster up to 16 and from 64 on",
    )
    (entry,) = applied.report.fused
    assert set(entry.gains_from.values()) == {64}
    assert entry.gains_until == {f"{dtype} inference": 16 for dtype in ("bfloat16", "float16", "float32", "float64")}
    said = manager_of(TwoEnds).plan(Norm()).explain("")
    assert "used up to 16 elements of the main input: bfloat16 inference, float16 inference" in said


def test_that_too_is_counted_in_what_the_op_works_on():
    class Wide(TwoEnds):
        kernel_id = "wide_two_ends_norm"

        def match(self, site):
            found = super().match(site)
            return found and [dataclasses.replace(each, work=1 / 3) for each in found]

    (entry,) = manager_of(Wide).apply_all(Norm()).report.fused
    assert (entry.gains_until["float32 inference"], entry.gains_from["float32 inference"]) == (48, 192)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_every_size_can_be_asked_for(how, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("FUSEPLUG_EVERY_SIZE", "1")
    module, applied = fused(**({"every_size": True} if how == "argument" else {}))
    module(rows(1))
    assert ran["norm"] == 1
    assert applied.report.fused[0].gains_from == {}


@pytest.mark.parametrize("word", ["0", "off", "False", "no"])
def test_a_variable_that_says_no_asks_for_nothing(word, monkeypatch):
    monkeypatch.setenv("FUSEPLUG_EVERY_SIZE", word)
    _, applied = fused()
    assert applied.report.fused[0].gains_from


def test_without_a_word_of_it_every_size_is_the_kernels():
    module = Norm()
    manager_of(NormKernel).apply_all(module)
    ran.clear()
    module(rows(1))
    assert ran["norm"] == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [*(("gains_from", said) for said in (-1, 1.5, True, None, "many")), ("gains_until", 2.5)],
)
def test_what_is_no_number_is_the_kernels_fault(name, said):
    report = manager_of(variant_of(NormKernel, **{name: lambda self, use: said})).apply_all(Norm()).report
    assert not report.fused
    assert f"{name}() must give a number of elements, 0 or more; it gave {said!r}" in report.left_alone[0].why_not


def test_an_error_is_the_kernels_fault():
    report = manager_of(variant_of(NormKernel, gains_from=lambda self, use: 1 // 0)).apply_all(Norm()).report
    assert "ZeroDivisionError" in report.left_alone[0].why_not
    assert report.left_alone[0].rejections[0][1].kind == "error"


class TestTracing:
    @pytest.fixture
    def left(self):
        kernel = variant_of(
            NormKernel, when_traced="original", function="support.kernels:quiet_norm", kernel_id="untraced"
        )
        module = Norm()
        manager_of(kernel).apply_all(module)
        return module

    def test_a_compiled_model_has_the_originals_operations(self, left):
        def operations(module):
            graphs = []
            torch.compile(module, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(rows(3))
            return [str(node.target) for node in graphs[0].graph.nodes if node.op != "placeholder"]

        kernels = Norm()
        manager_of(variant_of(NormKernel, function="support.kernels:quiet_norm")).apply_all(kernels)
        assert operations(left) == operations(Norm()) != operations(kernels)

    def test_so_has_a_traced_one(self, left):
        def operations(module):
            return [node.kind() for node in torch.jit.trace(module, rows(3)).inlined_graph.nodes()]

        assert operations(left) == operations(Norm())

    def test_in_a_dispatch_mode_the_original_runs(self, left):
        x = rows(3)
        with FlopCounterMode(display=False):
            assert torch.equal(left(x), Norm()(x))

    def test_where_torch_compiles_kernels_without_their_gradients_so_has_one_for_training(self, monkeypatch):
        monkeypatch.setattr(torch_private, "MISCOMPILES_FUNCTIONS", True)
        kernel = variant_of(NormKernel, function="support.kernels:quiet_norm")
        found, x = {}, rows(3)
        for mode in ("training", "inference"):
            module = Norm()
            applied = manager_of(kernel).apply_all(module, mode=mode)
            with torch.no_grad():
                compiled = torch.compile(module, backend="eager", fullgraph=True)(x)
            found[mode] = (torch.equal(compiled, Norm()(x)), [note[:49] for note in applied.report.notes])
        why = ["calls that torch.compile traces are the originals"]
        assert found == {"training": (True, why), "inference": (False, [])}

    def test_elsewhere_the_kernel_runs(self, left):
        x = rows(3)
        assert torch.equal(left(x), quiet_norm(x, left.weight, left.eps))
        assert not torch.equal(left(x), Norm()(x))

    def test_the_compiler_asks_nothing_of_the_guard(self, left):
        compiled = torch.compile(left, backend="eager", fullgraph=True)
        for number in (1, 2, 3, 9):
            x = rows(number)
            assert torch.equal(compiled(x), Norm()(x))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_in_a_transform_the_original_runs(transform):
    module, applied = fused(lambda self, use: 0)
    x = rows(3)
    torch.testing.assert_close(transform(module)(x), transform(Norm())(x), rtol=0, atol=0)
    module(x)
    assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 1)]


def test_a_kernel_says_which_of_the_two():
    from fuseplug.discovery.kernel_faults import faults

    assert faults(variant_of(NormKernel, when_traced="both")) == [
        'when_traced must be "kernel" or "original", not \'both\''
    ]


@pytest.mark.parametrize("work", [0, -1.0, "much"])
def test_the_work_of_a_proposal_is_a_positive_number(work):
    class Odd(NormKernel):
        kernel_id = "odd_work"

        def match(self, site):
            found = super().match(site)
            return found and [dataclasses.replace(each, work=work) for each in found]

    why = manager_of(Odd).apply_all(Norm()).report.raised["odd_work"]
    assert f"work must be a positive number, not {work!r}" in why


def functions_entered(call):
    """The names of the Python functions that *call* enters, in order."""
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def test_a_small_call_comes_to_the_original_through_one_function():
    module, applied = fused()
    x = rows(2)
    module(x)  # a module's first call passes the whole guard, which starts the count
    way = functions_entered(lambda: module.forward(x))
    assert way[:4] == ["<lambda>", "replaced", "is_dynamo_compiling", "forward"]
    assert [(calls.fused, calls.original) for calls in applied.calls()] == [(0, 2)]


def test_the_short_way_goes_to_what_now_stands_in_the_place_of_the_original(monkeypatch):
    module, _ = fused()
    x = rows(2)
    module(x)
    monkeypatch.setattr(Norm, "forward", lambda self, x: x + 1)
    assert torch.equal(module(x), x + 1)
