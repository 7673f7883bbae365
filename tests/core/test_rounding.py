"""With rounding="exact", only kernels that equal the original bit for bit are used."""

import contextlib
import json

import pytest
import torch
from support.kernels import NormKernel, norm_reference, quiet_norm, variant_of
from support.managers import manager_of
from support.models import Norm, tiny_llama

from fuseplug import PlanError, RejectedError
from fuseplug.cli import main

pytestmark = pytest.mark.usefixtures("examined_once")

REFERENCE = "support.kernels:norm_reference"


def large_differ(x, *args):
    """Has the original's bits for up to 4096 elements."""
    return (norm_reference if x.numel() <= 4096 else quiet_norm)(x, *args)


def beyond_differ(x, *args):
    """Has the original's bits at all sizes that are tried without ``rounding="exact"``."""
    return (norm_reference if x.numel() <= 6144 else quiet_norm)(x, *args)


def without_gradients_differ(x, *args):
    return (norm_reference if torch.is_grad_enabled() else quiet_norm)(x, *args)


def in_bfloat16_differ(x, *args):
    found = norm_reference(x, *args)
    return found if x.dtype is torch.float32 else found * (1 + torch.finfo(found.dtype).eps)


def strided_differ(x, *args):
    return (norm_reference if x.is_contiguous() else quiet_norm)(x, *args)


class OtherGradient(torch.autograd.Function):
    """The identity, with a gradient that is off by one bit."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.nextafter(gradient, gradient + 1)


def gradients_differ(x, *args):
    return OtherGradient.apply(norm_reference(x, *args))


def planned(function, rounding="exact", **options):
    function = function if ":" in function else f"{__name__}:{function}"
    kernel = variant_of(NormKernel, "the_norm", function=function, check_sizes=(512, 4096))
    return manager_of(kernel).plan(Norm(), rounding=rounding, **options).report


def test_what_is_bit_for_bit_the_original_is_used():
    report = planned(REFERENCE)
    assert [entry.check for entry in report.entries] == ["passed"]
    (note,) = report.notes
    assert note.startswith('rounding="exact": targets left alone because their kernels round otherwise: 0; fused')
    assert note.endswith(": 1")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("support.kernels:quiet_norm", "output[0] differs by up to"),
        ("large_differ", "output[0] differs by up to"),
        ("beyond_differ", "for float32[597, 16] on cpu"),
        ("without_gradients_differ", "output[0] differs by up to"),
        ("gradients_differ", "gradient of args[0] differs by up to"),
    ],
)
def test_what_rounds_otherwise_is_left_alone_with_the_difference(function, why):
    assert planned(function, rounding="close").fused
    (entry,) = planned(function).left_alone
    ((kernel, rejection),) = entry.rejections
    assert (kernel, rejection.kind) == ("the_norm", "rounding")
    assert "its rounding is not the original's for" in rejection.reason
    assert why in rejection.reason
    assert "because their kernels round otherwise: 1;" in planned(function).notes[0]


def test_without_training_gradients_may_differ():
    assert planned("gradients_differ", mode="inference").fused
    assert not planned("without_gradients_differ", mode="inference").fused


@pytest.mark.parametrize(
    ("function", "other"),
    [
        ("in_bfloat16_differ", torch.randn(4, 16, dtype=torch.bfloat16)),
        ("strided_differ", torch.randn(16, 4).T),
    ],
)
def test_calls_in_which_it_would_differ_are_the_originals(function, other):
    for rounding, used in (("close", 2), ("exact", 1)):
        kernel, module = variant_of(NormKernel, function=f"{__name__}:{function}"), Norm()
        applied = manager_of(kernel).apply_all(module, rounding=rounding)
        for x in (torch.randn(4, 16), other):
            assert rounding == "close" or torch.equal(module(x), Norm()(x))
            module(x) if rounding == "close" else None
        assert [calls.fused for calls in applied.calls()] == [used]


def test_it_is_no_reason_to_fail_but_if_the_kernel_was_asked_for():
    manager = manager_of(NormKernel)
    assert not manager.apply_all(Norm(), rounding="exact", strict=True).report.fused
    with pytest.raises(RejectedError, match=r"toy_norm was asked for by name.*its rounding is not the original's"):
        manager.apply("toy_norm", Norm(), rounding="exact")


def test_the_next_kernel_that_is_exact_is_used():
    manager = manager_of(
        variant_of(NormKernel, "first", priority=1), variant_of(NormKernel, "exact", function=REFERENCE)
    )
    (entry,) = manager.plan(Norm(), rounding="exact").report.entries
    assert (entry.kernel_id, [kernel for kernel, _ in entry.rejections]) == ("exact", ["first"])


def test_it_cannot_be_found_out_elsewhere():
    (entry,) = planned(REFERENCE, device="npu").entries
    assert 'plan with rounding="exact" once the model is there' in entry.why_not


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rounding": "bitwise"}, 'rounding=\'bitwise\' is unknown: expected "close" or "exact"'),
        ({"rounding": "exact", "verify": False}, "verify=False runs none: drop one of them"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, why):
    with pytest.raises(PlanError, match=why):
        manager_of(NormKernel).plan(Norm(), **options)


def test_the_report_can_be_written():
    report = planned("support.kernels:quiet_norm").to_dict()
    assert json.loads(json.dumps(report))["entries"][0]["rejections"][0]["kind"] == "rounding"


def test_in_a_shell_the_model_gets_weights_to_find_it_out(tmp_path, monkeypatch, capsys):
    tiny_llama().config.save_pretrained(tmp_path)
    exact = variant_of(NormKernel, "exact", function=REFERENCE)
    monkeypatch.setattr("fuseplug.cli.KernelManager", lambda: manager_of(exact))
    with contextlib.suppress(SystemExit):
        main(["plan", str(tmp_path), "--rounding", "exact", "--device", "cpu", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [entry["check"] for entry in told["entries"]] == ["passed"] * 5
    assert told["notes"][0].endswith("in all sizes tried: 5")
