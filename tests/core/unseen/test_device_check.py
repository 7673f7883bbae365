"""The check on the device says no to an original that is another one at its sizes, and to a kernel that is."""

from dataclasses import dataclass, replace

import pytest
import torch
from support.attacking import attacked, fused, numbers
from support.kernels import ExpertsAdapter, ExpertsKernel, NormKernel, quiet_norm, variant_of
from support.models import Experts, Norm


def normal(self, x):
    wide = x.to(torch.float32)
    return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class ByRows(Norm):
    """Told by no condition, and by no number that a shape is compared with."""

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


KERNELS = {
    "many rows": lambda x: len(x) > 64,
    "many elements": lambda x: x.numel() > 4000,
    "bfloat16": lambda x: x.dtype is torch.bfloat16,
    "a transposed input": lambda x: not x.is_contiguous(),
    "three dimensions": lambda x: x.dim() == 3,
    "autocast": lambda x: torch.is_autocast_enabled("cpu"),
}
GIVEN = {
    "many rows": numbers((70, 16)),
    "many elements": numbers((300, 16)),
    "bfloat16": numbers(dtype=torch.bfloat16),
    "a transposed input": numbers((5, 2, 16)).transpose(0, 1),
    "three dimensions": numbers(),
    "autocast": numbers(),
}
FUNCTIONS = {name: wrong_when(condition) for name, condition in KERNELS.items()}


@pytest.mark.parametrize("case", KERNELS)
def test_a_kernel_that_is_wrong_somewhere_is_not_used_there(case):
    def load(self):
        return FUNCTIONS[case]

    def around():
        return torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")

    attacked([variant_of(NormKernel, load=load, check_sizes=(512, 4096))], Norm, given=[[GIVEN[case]]], around=around)


class Subclass(torch.Tensor):
    pass


def test_a_kernel_that_returns_another_type_is_not_used():
    def load(self):
        return lambda *args: quiet_norm(*args).as_subclass(Subclass)

    assert attacked([variant_of(NormKernel, load=load)], Norm).last == "alone"


class GivingSubclass(Norm):
    def forward(self, x):
        return normal(self, x).as_subclass(Subclass)


def test_an_original_that_returns_another_type_is_left_alone():
    assert attacked([NormKernel], GivingSubclass).last == "alone"


def test_a_kernel_without_gradient_is_not_used_where_they_flow():
    kernel = variant_of(NormKernel, differentiable=False)
    assert attacked([kernel], Norm, mode="inference").last == "original"
    assert attacked([kernel], Norm, mode="inference", around=torch.no_grad).last == "kernel"


def only_without_gradients(*args):
    if torch.is_grad_enabled():
        raise AssertionError("it is planned for inference")
    return quiet_norm(*args)


def test_a_kernel_for_inference_is_neither_checked_nor_used_with_gradients():
    kernel = variant_of(NormKernel, load=lambda self: only_without_gradients)
    assert attacked([kernel], Norm).last == "alone"
    assert attacked([kernel], Norm, mode="inference").last == "original"
    assert attacked([kernel], Norm, mode="inference", around=torch.no_grad).last == "kernel"


def meta_by_default(patch=None):
    return torch.device("meta")


def test_another_default_device_changes_nothing():
    assert attacked([NormKernel], Norm, around=meta_by_default, given=[[numbers().requires_grad_(False)]]).answers


@dataclass(frozen=True)
class Reading(ExpertsAdapter):
    reads: tuple[str, ...] = ("experts.*.weight", "experts.*.eps")


class ReadingKernel(ExpertsKernel):
    def match(self, site):
        found = super().match(site)
        return found and [replace(each, adapters=(Reading(),)) for each in found]


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
    """Like all but one, which is the last."""

    def __init__(self, other, common=Norm):
        super().__init__()
        del self.experts
        self.experts = torch.nn.ModuleList([common(), other()])


OTHERS = {
    "of another class": lambda: Mixed(Doubled),
    "with another number": lambda: Mixed(lambda: Numbered(scale=2.0), Numbered),
    "with a forward of its own": lambda: _with_own_forward(Experts()),
}


def _with_own_forward(module):
    last = module.experts[1]
    last.forward = lambda x: Norm.forward(last, x) * 2
    return module


@pytest.mark.parametrize("case", OTHERS)
def test_experts_that_differ_are_computed_each_as_it_is(case):
    assert attacked([ReadingKernel], OTHERS[case]).last != "kernel"


def test_experts_that_do_not_are_fused():
    assert attacked([ReadingKernel], Experts).last == "kernel"


def test_an_expert_that_differs_later_is_computed_as_it_is():
    met = attacked([ReadingKernel], lambda: Mixed(Numbered, Numbered), lambda m: setattr(m.experts[1], "scale", 2.0))
    assert met.answers == ("kernel", "original"), met


def test_the_report_names_what_was_found():
    applied = fused(Mixed(Doubled), [ReadingKernel])
    assert all(entry.why_not for entry in applied.report.left_alone)
