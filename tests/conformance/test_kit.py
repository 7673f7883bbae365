"""What the kit itself promises: its result, its edge cases, and the comparison beneath them."""

import pytest
import torch
from conformance.zoo import adapters, kernels, specimens
from torch import nn

from fuseplug import Example, FuseplugError, PlanError
from fuseplug_testing import ConformanceError, check_kernel
from fuseplug_testing.edges import MEMORY_LAYOUTS, UPSTREAM, arguments, planted, shapes
from fuseplug_testing.kit import NAMES
from fuseplug_testing.results import Conformance, Finding


def test_faults_are_listed_each_with_its_check_and_specimen():
    with pytest.raises(ConformanceError, match="zoo_gated on cpu: 2 faults") as raised:
        check_kernel(adapters.UnlikeSpecimens, checks=["specimens", "declaration", "variants"])
    assert isinstance(raised.value, FuseplugError)
    assert isinstance(raised.value, AssertionError)
    assert {(fault.check, fault.where) for fault in raised.value.result.faults} == {
        ("specimens", "0 FirstHalf"),
        ("variants", "plain"),
    }
    assert "fault    specimens: 0 FirstHalf: nothing of it is fused" in str(raised.value)
    assert "let match() propose what fits it" in str(raised.value)


def test_a_result_reads_as_what_was_right_and_what_was_not_asked():
    result = Conformance("mine", "cpu")
    result.add("numbers", "0 Norm", [Finding("llama"), Finding("gemma"), Finding("t5", skipped="no weight")])
    assert str(result).splitlines() == [
        "mine on cpu: 0 faults; 2 questions answered right, 1 skipped",
        "  right    numbers (2)",
        "  skipped  numbers (1): no weight",
    ]


def test_what_relies_on_right_numbers_is_not_asked_of_wrong_ones():
    wrong = type("Wrong", (kernels.Norm,), {"function": "conformance.zoo.wrong:zeros"})
    with pytest.raises(ConformanceError) as raised:
        check_kernel(wrong, checks=["numbers", "layouts"])
    assert {fault.check for fault in raised.value.result.faults} == {"numbers"}
    assert {(skip.check, skip.why) for skip in raised.value.result.skipped} == {("layouts", "numbers has faults on it")}


def test_a_variant_that_the_kernel_declines_is_no_fault_and_not_run():
    class Declining(kernels.Norm):
        function = "conformance.zoo.wrong:without_offset"

        def unsupported(self, adapter):
            return "the chip has no 1 + w" if adapter.variant == "offset" else None

    result = check_kernel(Declining, checks=["variants", "specimens", "numbers", "undo"])
    assert result.passed["variants"] == 2
    assert result.passed["specimens"] == 1
    assert {(s.check, s.where) for s in result.skipped if "the chip has no 1 + w" in s.why} == {
        (check, "1 OffsetNorm") for check in ("specimens", "numbers", "undo")
    }


def test_children_that_an_adapter_calls_need_not_be_declared():
    assert check_kernel(kernels.Product, checks=["specimens", "reads", "numbers"]).passed["reads"]


def test_specimens_may_be_handed_over_and_an_instance_too():
    result = check_kernel(kernels.Norm(), [specimens.CastLastNorm()], checks=["specimens", "numbers"])
    assert result.passed["specimens"] == 1


def test_a_kernel_for_a_device_that_is_not_here_is_checked_but_for_its_numbers():
    checks = ["declaration", "match", "specimens", "example", "numbers", "undo"]
    result = check_kernel(kernels.OnAnotherChip, checks=checks)
    assert result.device is None
    assert result.passed.keys() == {*checks} - {"numbers", "undo"}
    assert "skipped  numbers (2): it runs on npu, and none is here" in str(result)


def test_thorough_asks_more():
    usual, thorough = (
        check_kernel(kernels.Norm, thorough=flag, checks=["specimens", "numbers", "layouts"]) for flag in (False, True)
    )
    assert thorough.passed["layouts"] > usual.passed["layouts"]


def test_a_fault_of_one_specimen_hides_no_other():
    with pytest.raises(ConformanceError) as raised:
        check_kernel(kernels.Norm, [nn.Linear(2, 2), specimens.OffsetNorm()], checks=["specimens", "numbers"])
    assert [fault.where for fault in raised.value.result.faults if fault.check == "specimens"] == ["0 Linear"]
    assert raised.value.result.passed["numbers"]


@pytest.mark.parametrize("layout", [*MEMORY_LAYOUTS.values(), *UPSTREAM.values()], ids=[*MEMORY_LAYOUTS, *UPSTREAM])
@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (2, 3), (2, 3, 4)], ids=str)
def test_a_layout_keeps_shape_and_gradient_and_is_another_tensor(layout, shape):
    leaf = torch.randn(shape, requires_grad=True)
    laid = layout(leaf)
    assert laid.shape == leaf.shape
    assert laid is not leaf
    (gradient,) = torch.autograd.grad(laid.sum(), leaf)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", [name for name in MEMORY_LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_a_layout_keeps_values_and_lies_otherwise(name, dtype):
    tensor = torch.randn(2, 3, 4).to(dtype)
    laid = MEMORY_LAYOUTS[name](tensor)
    assert torch.equal(laid, tensor)
    assert (laid.stride(), laid.storage_offset()) != (tensor.stride(), tensor.storage_offset())


def test_what_lies_between_elements_is_nan():
    for name in ("every other element of a buffer", "part of wider rows", "not aligned"):
        whole = torch.tensor(MEMORY_LAYOUTS[name](torch.zeros(2, 3)).untyped_storage(), dtype=torch.uint8).view(
            torch.float32
        )
        assert whole.isnan().any()


def test_arguments_are_cut_along_with_the_main_input():
    example = Example([torch.randn(2, 3, 6, 8), torch.randn(2, 1, 6, 8), torch.randn(6, 8)])
    cut = {what: ways for what, _, _, ways in shapes(example)}
    way, other = cut["dimension 2 odd (5 of 6)"]
    assert [tuple(t.shape) for t in way.args] == [(2, 3, 5, 8), (2, 1, 5, 8), (5, 8)]
    assert [tuple(t.shape) for t in other.args] == [(2, 3, 5, 8), (2, 1, 5, 8), (6, 8)]
    assert [tuple(t.shape) for t in cut["dimension 0 empty (0 of 2)"][0].args] == [(0, 3, 6, 8), (0, 1, 6, 8), (6, 8)]


def test_a_value_is_planted_in_one_argument_and_the_example_left_alone():
    example = Example([torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)])
    with_nan = planted(example, 0, float("nan"))
    assert int(with_nan.args[0].isnan().sum()) == 1
    assert not example.args[0].isnan().any()
    assert planted(example, 1, float("nan")) is None


def test_what_is_passed_by_name_has_the_same_edges():
    x, scale = torch.zeros(2, 6, 8), torch.zeros(6, 8)
    example = Example([x], kwargs={"flag": True, "scale": scale, "dtype": torch.float32})
    assert [value for value in arguments(example) if isinstance(value, torch.Tensor)] == [x, scale]
    which = next(number for number, value in enumerate(arguments(example)) if value is scale)
    with_nan = planted(example, which, float("nan"))
    assert int(with_nan.kwargs["scale"].isnan().sum()) == 1
    assert not with_nan.args[0].isnan().any()
    assert (with_nan.kwargs["flag"], with_nan.kwargs["dtype"]) == (True, torch.float32)
    ways = next(ways for what, _, _, ways in shapes(example) if what == "dimension 1 odd (5 of 6)")
    assert tuple(ways[0].kwargs["scale"].shape) == (5, 8)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("number", "numbers"),
        ("Numbers", "numbers"),
        ("no_grad", "no-grad"),
        ("grad", "gradients"),
        ("special", "special-values"),
        ("compiled", "compile"),
        *((name, "") for name in ("xyz", "fast", "export", "strides", "forward", "", "re", "de")),
    ],
)
def test_only_a_check_of_a_name_that_is_near_is_suggested(name, near):
    with pytest.raises(PlanError) as raised:
        check_kernel(kernels.Norm, checks=["numbers", name])
    hint = f" (did you mean {near!r}?)" if near else ""
    assert str(raised.value) == f"there is no check {name!r}{hint}; expected one of {', '.join(NAMES)}"
