"""Functions that write into an argument, as a decoding step writes into its state."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fuseplug_verify import Candidate, Conditions, Example, Refusal, Semantics, Subject, check, examine


def advance(state, x):
    new = state * x.sigmoid() + x
    state.copy_(new)
    return 2 * new


def rounding(state, x):
    state.copy_(state.bfloat16())
    return state * x.sigmoid()


class Advancing(nn.Module):
    def forward(self, state, x):
        return advance(state, x)


class Rounding(nn.Module):
    def forward(self, state, x):
        return rounding(state, x)


def in_another_order(state, x):
    new = torch.addcmul(x.double(), state.double(), x.double().sigmoid()).to(state.dtype)
    state.copy_(new)
    return 2 * new


def leaves_it_alone(state, x):
    return in_another_order(state.clone(), x)


def writes_twice(state, x):
    in_another_order(state, x)
    return in_another_order(state, x)


def writes_coarsely(state, x):
    result = in_another_order(state, x)
    state.copy_(state.bfloat16())
    return result


def writes_into_x(state, x):
    result = in_another_order(state, x.clone())
    x.add_(1e-7 * x)
    return result


def does_not_round(state, x):
    return state.bfloat16().to(state.dtype) * x.sigmoid()


def example(dtype, size, generator):
    return Example([torch.randn(-(-size // 16), 16, generator=generator).to(dtype) for _ in range(2)])


CANDIDATE = Candidate(example, [torch.float32, torch.bfloat16], exact=False, reference=in_another_order)


def examined(module, name, **changes):
    subject = Subject.of_function(type(module).forward, name)
    return subject, examine(subject, replace(CANDIDATE, **changes))


def test_what_is_written_is_a_result():
    subject, semantics = examined(Advancing(), "advance")
    assert isinstance(semantics, Semantics), semantics
    assert isinstance(check(semantics, subject, in_another_order), Conditions)


def test_calls_with_gradients_are_not_accepted_where_the_backward_raises():
    """The backward needs the overwritten state. Every mix runs without gradients, not only the first."""
    _, semantics = examined(Advancing(), "advance")
    assert semantics.accepts.watch.no_grad
    assert {dtypes[0] for dtypes in semantics.accepts.dtypes} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (leaves_it_alone, r"args\[0\] afterwards differs from what the original writes there"),
        (writes_twice, r"output\[0\] is off by"),
        (writes_coarsely, r"args\[0\] afterwards is off by"),
        (writes_into_x, r"args\[1\] afterwards differs from what the original writes there"),
    ],
)
def test_what_writes_something_else_is_refused(function, why):
    subject, semantics = examined(Advancing(), "advance")
    for answer in (check(semantics, subject, function), examined(Advancing(), "advance", reference=function)[1]):
        assert isinstance(answer, Refusal)
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(answer.reason)


def test_a_small_write_that_only_the_original_makes_is_seen():
    """The written values are within the tolerance of the values from before."""
    _, answer = examined(Rounding(), "rounding", reference=does_not_round, roundings=2.0**17)
    assert isinstance(answer, Refusal)
    assert "args[0] afterwards differs from what the original writes there" in answer.reason
