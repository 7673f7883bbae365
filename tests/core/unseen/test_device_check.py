"""The check on the device refuses originals and kernels that compute something else at its sizes."""

import pytest
import torch
from support.attacking import attacked, numbers
from support.kernels import ExpertsKernel, GateKernel, NormKernel, quiet_norm, variant_of
from support.models import Experts, Norm, apply_gate, normal
from torch import nn


class ByRows(Norm):
    """Depends on the number of rows without a condition, and without comparing a shape with a number."""

    def forward(self, x):
        return normal(self, x) * (1 + 0.5 * float(torch.ones(x.shape[:-1]).sum().gt(64)))


class ByWidth(Norm):
    def forward(self, x):
        return normal(self, x) * (1 + 0.5 * float(torch.ones(x.shape[-1]).sum().gt(32)))


class ByDtype(Norm):
    def forward(self, x):
        return normal(self, x) * (1.5 if x.element_size() == 2 else 1.0)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (ByRows, numbers((70, 16))),
        (lambda: ByWidth(64), numbers((5, 64))),
        (ByDtype, numbers(dtype=torch.bfloat16)),
    ],
    ids=["rows", "width", "dtype"],
)
def test_an_original_that_differs_at_some_size_gives_its_own_numbers(make, x):
    assert attacked([NormKernel], make, given=[[x]]).last != "kernel"


def wrong_when(condition):
    def norm(x, weight, eps, offset=None, cast_last=False):
        y = quiet_norm(x, weight, eps, offset, cast_last)
        return y * 1.5 if condition(x) else y

    return norm


WRONG = {
    "many rows": (lambda x: len(x) > 64, numbers((70, 16))),
    "many elements": (lambda x: x.numel() > 4000, numbers((300, 16))),
    "bfloat16": (lambda x: x.dtype is torch.bfloat16, numbers(dtype=torch.bfloat16)),
    "a transposed input": (lambda x: not x.is_contiguous(), numbers((5, 2, 16)).transpose(0, 1)),
    "three dimensions": (lambda x: x.dim() == 3, numbers()),
    "autocast": (lambda x: torch.is_autocast_enabled("cpu"), numbers()),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_kernel_that_is_wrong_somewhere_is_not_used_there(case):
    condition, x = WRONG[case]
    kernel = variant_of(NormKernel, load=lambda self: wrong_when(condition), check_sizes=(512, 4096))

    def around():
        return torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")

    attacked([kernel], Norm, given=[[x]], around=around)


class Gated(nn.Module):
    def forward(self, x, gate):
        return apply_gate(x, gate)


def flat_gate(x, gate):
    """Right only where the elements of both lie in memory one after the other."""
    return x * torch.sigmoid(gate.as_strided(gate.shape, torch.empty(gate.shape).stride()))


@pytest.mark.parametrize("strange", [0, 1])
def test_a_kernel_for_contiguous_inputs_gets_no_input_that_is_not(strange):
    given = [numbers((5, 2, 16)), numbers((5, 2, 16), seed=8)]
    given[strange] = given[strange].transpose(0, 1).contiguous().transpose(0, 1)
    kernel = variant_of(GateKernel, load=lambda self: flat_gate)
    assert attacked([kernel], Gated, given=[given]).last == "original"


def gate_in_step(x, gate):
    """Right only where the elements of both lie alike in memory."""
    return x * torch.sigmoid(gate.as_strided(gate.shape, x.stride()))


def test_a_kernel_that_expects_inputs_to_lie_alike_gets_no_others():
    given = [numbers((5, 2, 16)).transpose(0, 1), numbers((2, 5, 16), seed=8)]
    kernel = variant_of(GateKernel, load=lambda self: gate_in_step)
    assert attacked([kernel], Gated, given=[given]).last == "original"


class Subclass(torch.Tensor):
    pass


def test_a_kernel_that_returns_another_type_is_not_used():
    kernel = variant_of(NormKernel, load=lambda self: lambda *args: quiet_norm(*args).as_subclass(Subclass))
    assert attacked([kernel], Norm).last == "alone"


class GivingSubclass(Norm):
    def forward(self, x):
        return normal(self, x).as_subclass(Subclass)


def test_an_original_that_returns_another_type_is_left_alone():
    assert attacked([NormKernel], GivingSubclass).last == "alone"


def only_without_gradients(*args):
    if torch.is_grad_enabled():
        raise AssertionError("it is planned for inference")
    return quiet_norm(*args)


def test_a_kernel_for_inference_is_neither_checked_nor_used_with_gradients():
    kernel = variant_of(NormKernel, load=lambda self: only_without_gradients)
    assert attacked([kernel], Norm).last == "alone"
    assert attacked([kernel], Norm, mode="inference").last == "original"
    assert attacked([kernel], Norm, mode="inference", around=torch.no_grad).last == "kernel"


def test_another_default_device_changes_nothing():
    assert attacked([NormKernel], Norm, around=lambda: torch.device("meta")).answers


class Doubled(Norm):
    def forward(self, x):
        return normal(self, x) * 2


class Numbered(Norm):
    def __init__(self, size=16, scale=1.0):
        super().__init__(size)
        self.scale = scale

    def forward(self, x):
        return normal(self, x) * self.scale


class Mixed(Experts):
    """Experts that are all alike, except for the last one."""

    def __init__(self, other, common=Norm):
        super().__init__()
        del self.experts
        self.experts = torch.nn.ModuleList([common(), other()])


def with_own_forward():
    module = Experts()
    last = module.experts[1]
    last.forward = lambda x: Norm.forward(last, x) * 2
    return module


@pytest.mark.parametrize(
    "make",
    [lambda: Mixed(Doubled), lambda: Mixed(lambda: Numbered(scale=2.0), Numbered), with_own_forward],
    ids=["of another class", "with another number", "with a forward of its own"],
)
def test_experts_that_differ_are_computed_each_as_it_is(make):
    applied = attacked([ExpertsKernel], make)
    assert applied.last == "alone"
    assert applied.alone


def test_experts_that_do_not_are_fused():
    assert attacked([ExpertsKernel], Experts).last == "kernel"


def test_an_expert_that_differs_later_is_computed_as_it_is():
    met = attacked([ExpertsKernel], lambda: Mixed(Numbered, Numbered), lambda m: setattr(m.experts[1], "scale", 2.0))
    assert met.answers == ("kernel", "original"), met
