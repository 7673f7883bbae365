"""Values in tuples, lists and dicts, and in subclasses of these."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from fuseplug_verify.verification.nested import leaves, mapped, tensors

ONE, TWO = torch.ones(1), torch.ones(2)


class Pair(NamedTuple):
    first: Any
    second: Any


class Output(OrderedDict):
    """Like the outputs of transformers' models."""


def test_leaves_are_what_is_no_container():
    value = {"a": [1, (TWO, None)], "b": Output(c=ONE), "d": TWO.shape}
    assert list(leaves(value)) == [1, TWO, None, ONE, TWO.shape]
    assert tensors(value) == [TWO, ONE]
    assert list(leaves(ONE)) == [ONE]


def test_what_is_mapped_has_the_classes_that_it_had():
    def change(leaf):
        return "tensor" if isinstance(leaf, torch.Tensor) else leaf

    value = [(ONE, None), Pair(ONE, 2), Output(c=ONE), torch.ones(2, 2).max(1), TWO.shape]
    pair, named, output, largest, shape = mapped(change, value)
    assert (pair, named, shape) == (("tensor", None), Pair("tensor", 2), TWO.shape)
    assert (type(output), output) == (Output, Output(c="tensor"))
    assert (type(largest), largest.values, largest.indices) == (torch.return_types.max, "tensor", "tensor")
    assert value[1].first is value[2]["c"] is ONE
