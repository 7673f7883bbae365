"""A replacement for a module is verified, or refused with the difference as the reason."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fuseplug_verify import (
    Adapter,
    Candidate,
    Conditions,
    Example,
    Refusal,
    Semantics,
    Subject,
    Verifier,
    check,
    examine,
)


class Norm(nn.Module):
    def __init__(self, width: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def example(dtype, size, generator):
    x = torch.randn(-(-size // 16), 16, generator=generator).to(dtype)
    return Example([x], {"weight": torch.rand(16, generator=generator).to(dtype)})


CANDIDATE = Candidate(example, [torch.float32], check_sizes=(64, 4096))


def right(self, x):
    return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def own_eps(self, x):
    return nn.functional.rms_norm(x, self.weight.shape, self.weight, 1e-3)


def detached(self, x):
    return right(self, x).detach()


def half(self, x):
    return right(self, x).bfloat16()


def flat(self, x):
    return right(self, x).flatten()


def a_list(self, x):
    return [right(self, x)]


def writes(self, x):
    result = right(self, x.clone())
    with torch.no_grad():
        x.mul_(2)
    return result


def wrong_when_large(self, x):
    return right(self, x) * (1.5 if x.numel() > 1000 else 1.0)


def wrong_without_gradients(self, x):
    return right(self, x) * (1.0 if torch.is_grad_enabled() else 1.5)


_BUFFERS = {}


def reuses_memory_without_gradients(self, x):
    result = right(self, x)
    if torch.is_grad_enabled():
        return result
    return _BUFFERS.setdefault((x.shape, x.dtype), torch.empty_like(x)).copy_(result)


def wrong_with_frozen_weights(self, x):
    return right(self, x) * (1.5 if torch.is_grad_enabled() and not self.weight.requires_grad else 1.0)


def wrong_in_one_row(self, x):
    return right(self, x) * (1.5 if x.shape[:-1] == (1, 1) else 1.0)


def raises(self, x):
    raise RuntimeError("no kernel image is available")


WRONG = {
    own_eps: r"float32\[4, 16\] on cpu: output\[0\] is off by [\d.e-]+ where [\d.e-]+ is allowed",
    detached: r"gradient of args\[0\] is None instead of float32\[4, 16\]",
    half: r"output\[0\] is bfloat16\[4, 16\] instead of float32\[4, 16\]",
    flat: r"output\[0\] is float32\[64\] instead of float32\[4, 16\]",
    a_list: r"returns \[Tensor\] instead of Tensor",
    writes: r"args\[0\] afterwards differs from what the original writes there",
    wrong_when_large: r"float32\[256, 16\] on cpu: output\[0\] is off by",
    wrong_without_gradients: r"without gradients: output\[0\] is off by",
    reuses_memory_without_gradients: r"float32\[4, 16\] on cpu without gradients: output\[0\] is off by",
    wrong_with_frozen_weights: "it fails on cpu if no gradient of a weight is wanted",
    raises: r"RuntimeError while running on cpu: no kernel image is available",
}


@pytest.fixture(scope="module")
def semantics():
    answer = examine(Norm(), CANDIDATE)
    assert isinstance(answer, Semantics)
    return answer


def test_a_right_one_is_right(semantics):
    assert check(semantics, Norm(), right) == Conditions(dtypes=((torch.float32,),))
    assert semantics.accepts.watch.described() == ["eps is 1e-06"]


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_a_wrong_one_is_refused_with_what_differs(semantics, function):
    answer = check(semantics, Norm(), function)
    assert isinstance(answer, Refusal)
    with pytest.raises(AssertionError, match=WRONG[function]):
        raise AssertionError(answer.reason)
    assert answer.kind == ("error" if function is raises else "failed")


def test_one_row_is_run_in_all_dimensions_of_the_examples():
    def of_two_sequences(dtype, size, generator):
        made = example(dtype, size, generator)
        return replace(made, args=[torch.stack((made.args[0], -made.args[0]))])

    semantics = examine(Norm(), replace(CANDIDATE, example=of_two_sequences))
    assert isinstance(check(semantics, Norm(), right), Conditions)
    assert "float32[1, 1, 16] on cpu: output[0] is off by" in check(semantics, Norm(), wrong_in_one_row).reason


def test_what_is_wrong_in_some_calls_only_is_said(semantics):
    def in_order(self, x):
        return right(self, x) if x.is_contiguous() else right(self, x) * 1.5

    def without_autocast(self, x):
        return right(self, x) * (1.5 if torch.is_autocast_enabled("cpu") else 1.0)

    def of_two_dimensions(self, x):
        return right(self, x) if x.dim() == 2 else x

    usual = Conditions(dtypes=((torch.float32,),))
    assert check(semantics, Norm(), in_order) == replace(usual, contiguous=True)
    assert check(semantics, Norm(), without_autocast) == replace(usual, no_autocast=True)
    assert check(semantics, Norm(), of_two_dimensions) == replace(usual, ranks=frozenset({2}))


def test_without_gradients_one_that_has_none_is_right(semantics):
    assert isinstance(check(semantics, Norm(), detached, gradients=False), Conditions)


class Sparse(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(16).to_sparse())


class Noting(Norm):
    def forward(self, x):
        self.last = x
        return super().forward(x)


class Odd(Norm):
    forward = staticmethod(len)


@pytest.mark.parametrize(
    ("module", "kind", "why"),
    [
        (Sparse(), "unsupported", "its mask is of layout torch.sparse_coo, and kernels read dense tensors"),
        (Noting(), "unlike", r"it does more than compute, .*self.last = x \(line"),
        (Odd(), "unlike", "it is a builtin_function_or_method, whose code cannot be read"),
    ],
)
def test_a_module_that_cannot_be_verified_is_refused(module, kind, why):
    answer = examine(module, CANDIDATE)
    assert isinstance(answer, Refusal)
    assert answer.kind == kind
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(answer.reason)
    assert isinstance(check(examine(Norm(), CANDIDATE), Sparse(), right), Refusal)


@dataclass(frozen=True)
class Scaled(Adapter):
    variant: str
    offset: float
    reads = ("weight", "eps")

    def bind(self, compute):
        offset = self.offset

        def forward(module, x):
            return compute(x, module.weight, module.eps, offset)

        return forward


def reference(x, weight, eps, offset):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (offset + weight) * normed.to(x.dtype)


def test_behaviour_tells_which_variant_a_module_is():
    variants = [Scaled("around one", 1.0), Scaled("plain", 0.0)]
    answer = examine(Norm(), replace(CANDIDATE, adapters=variants, reference=reference))
    assert isinstance(answer, Semantics)
    assert answer.adapter == variants[1]
    assert answer.accepts.watch.described() == ["eps is a number"]
    refusal = examine(Norm(), replace(CANDIDATE, adapters=variants[:1], reference=reference))
    assert isinstance(refusal, Refusal)
    assert "of 1 tried, the likeliest is around one: output[0] differs by up to" in refusal.reason


def scale(x, factor):
    return x * factor


class Calling(nn.Module):
    def forward(self, x):
        return scale(x, 3)


def test_a_function_that_a_method_looks_up_is_verified():
    subject = Subject.of_function(Calling.forward, "scale")
    assert isinstance(subject, Subject)
    called = replace(CANDIDATE, example=lambda *how: Example([*example(*how).args, 3]))
    answer = examine(subject, called)
    assert isinstance(answer, Semantics)
    assert isinstance(check(answer, subject, lambda x, factor: factor * x), Conditions)
    assert isinstance(check(answer, subject, lambda x, factor: factor + x), Refusal)


def sized(width, mix, size, generator):
    return Example([torch.randn(max(4, size // width), width, generator=generator), 3])


@pytest.mark.parametrize("closure", [False, True])
def test_a_function_is_verified_for_each_size_of_the_modules_that_call_it(closure):
    def of_width(width):
        made = functools.partial(sized, width)
        return replace(CANDIDATE, example=(lambda *how: made(*how)) if closure else made)

    def narrow(x, factor):
        return x * (factor if x.shape[-1] < 32 else 0)

    verifier, subject = Verifier(), Subject.of_function(Calling.forward, "scale")
    found = [
        verifier.check(verifier.examine(subject, of_width(width)), subject, narrow, torch.device("cpu"))
        for width in (16, 32)
    ]
    assert [type(each) for each in found] == [Conditions, Refusal]


def test_a_function_that_is_not_looked_up_is_refused():
    answer = Subject.of_function(Calling.forward, "turn")
    assert answer == Refusal("Calling.forward does not call turn", kind="unsupported")
    with pytest.raises(TypeError, match="a function has no twin"):
        Subject(scale, None).twin(Example([torch.ones(1)]))


def forward(self, x):
    return 2 * x


def test_a_twin_has_the_functions_of_the_module_bound_to_itself():
    """The functions are not looked up by name in the class."""
    module = Norm()
    module.more = [types.MethodType(forward, module), {"one": module.forward}]
    subject = Subject.of_method(module, Norm.forward)
    assert isinstance(subject, Subject)
    twin = subject.twin(Example([torch.ones(1, 16)], {"weight": torch.ones(16)}))
    doubling, own = twin.more[0], twin.more[1]["one"]
    assert (doubling.__func__, own.__func__) == (forward, Norm.forward)
    assert doubling.__self__ is own.__self__ is twin
