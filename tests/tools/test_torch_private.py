"""What `fuseplug_tools.torch_private` says of torch's private names, asked of the torch that is installed."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fuseplug_tools.torch_private import default_store, get_tracing_state, tree_map

X = torch.ones(2)


def test_the_state_of_a_trace_is_there_while_tracing():
    seen = []
    torch.jit.trace(lambda x: seen.append(get_tracing_state() is not None) or x * 1, X)
    assert True in seen
    assert get_tracing_state() is None
    make_fx(lambda x: x * 1)(X)
    assert get_tracing_state() is None


def test_a_tree_is_walked_through_with_its_containers():
    assert tree_map(str, {"a": (1, [2]), "b": None}) == {"a": ("1", ["2"]), "b": "None"}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_the_store_is_that_with_which_the_ranks_met():
    met = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=met, rank=0, world_size=1)
    try:
        store = default_store()
        store.set("said", "here")
        assert store.get("said") == b"here"
        assert store.compare_set("decided", "", "first") == store.compare_set("decided", "", "second") == b"first"
    finally:
        torch.distributed.destroy_process_group()
