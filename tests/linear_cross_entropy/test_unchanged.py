"""`Remembered` sees every kind of write into a tensor, and takes nothing else for one."""

import pytest
import torch

from fuseplug_linear_cross_entropy.lazy_tensor.unchanged import SAMPLED, Remembered


def _gathered_again(tensor):
    """Free the memory and fill it again as `fully_shard` gathers a parameter anew, which does not count as a write."""
    values, size = tensor.detach().clone(), tensor.untyped_storage().size()
    with torch.autograd._unsafe_preserve_version_counter(tensor), torch.no_grad():
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)
        tensor.copy_(values)


CHANGES = {
    "in place": lambda t: t.detach().add_(1),
    "through data": lambda t: t.data.copy_(t.detach() * 2),
    "scaled through data": lambda t: t.data.mul_(1.001),
    "one element of few": lambda t: t.data[1].fill_(7),
    "other memory": lambda t: setattr(t, "data", t.detach().clone()),
    "another part of the memory": lambda t: setattr(t, "data", t.data.flip(0)),
    "its storage": lambda t: t.untyped_storage().fill_(0),
    "from numpy": lambda t: t.detach().numpy().fill(3),
}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, strided):
    tensor = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0))
    tensor = tensor.permute(2, 0, 1)[:, 1:] if strided else tensor
    remembered = Remembered(tensor)
    assert remembered.change() == ""
    CHANGES[change](tensor)
    assert remembered.change() == "was changed in place"


def test_freed_memory_is_told_from_a_change():
    tensor = torch.ones(3)
    remembered = Remembered(tensor)
    tensor.untyped_storage().resize_(0)
    assert remembered.change() == "was freed"


UNCHANGED = {
    "left alone": lambda t: None,
    "read": lambda t: t.sum(),
    "gathered again": _gathered_again,
    "written elsewhere": lambda t: t.clone().zero_(),
}
TENSORS = {
    "nothing": torch.empty(0, 3),
    "a number": torch.tensor(2.0),
    "not numbers": torch.tensor([float("nan"), -0.0]),
    "truths": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "columns": torch.arange(12.0).view(3, 4).t(),
    "large": torch.arange(5.0 * SAMPLED).view(5, -1),
    "expanded": torch.ones(1, 3).expand(4, 3),
}


@pytest.mark.parametrize("done", UNCHANGED)
@pytest.mark.parametrize("tensor", TENSORS)
def test_what_is_no_change_is_none(tensor, done):
    if done == "gathered again" and tensor in ("nothing", "expanded"):
        pytest.skip("it has no memory of its own to gather")
    tensor = TENSORS[tensor]
    remembered = Remembered(tensor)
    UNCHANGED[done](tensor)
    assert remembered.change() == ""


@pytest.mark.parametrize("shape", [(64, 1024), (1000, 333), (7, 9, 5000)])
def test_every_part_of_a_large_tensor_has_its_sample(shape):
    tensor = torch.zeros(shape)
    for block in tensor.view(-1).split(tensor.numel() // 1000):
        remembered = Remembered(tensor)
        block.data.add_(1)
        assert remembered.change() == "was changed in place"
