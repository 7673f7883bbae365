"""The one function into which everything that is watched is compiled."""

import pytest
import torch
from torch import Tensor

from fuseplug import Target
from fuseplug.accepts import Accepts
from fuseplug.patching.guard import Guard
from fuseplug.watch import ById, Call


def turn(x):
    return x


@pytest.mark.parametrize("name", ["turn", "turn_modules", "_parameters", "_buffers"])
def test_a_function_is_compared_whatever_its_name(name):
    names = {name: turn}
    call = Call(1, (), (frozenset({Tensor}),), (frozenset(),))
    accepts = Accepts((call,), 0, (0,), ((torch.float32,),), space=ById(names))
    guard = Guard(call, turn, Target("forward", name), "cpu", accepts)
    assert guard.holds([torch.ones(2)])
    assert guard.why_never(None) == ""
    names[name] = lambda x: x
    assert not guard.holds([torch.ones(2)])
    assert "is no longer the one that was replaced" in guard.why_not([torch.ones(2)])
