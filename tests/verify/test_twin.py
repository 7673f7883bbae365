"""A twin copies only the values that a run needs: copying all those of a large head takes longer than the run."""

import pytest
import torch
from torch import nn

from fuseplug_verify import Example
from fuseplug_verify.verification.twin import twin


def test_no_parameter_is_copied_but_those_of_the_example():
    module, weight, placed = nn.BatchNorm1d(4), torch.ones(4), []

    def place(tensor):
        placed.append(tensor)
        return tensor.clone()

    copy = twin(module, Example((torch.ones(2, 4),), parameters={"weight": weight}), place)
    buffers = [*module.buffers()]
    assert len(placed) == len(buffers) + 1
    assert all(any(tensor is one for one in buffers) for tensor in placed[:-1])
    assert torch.equal(copy.weight, weight)
    assert copy.bias.is_meta


def test_values_of_a_child_are_those_of_a_module():
    with pytest.raises(
        ValueError, match=r"has 'fc.weight', and takes the module's own only: give a child in children="
    ):
        Example((torch.ones(2, 4),), parameters={"fc.weight": torch.ones(4)})
