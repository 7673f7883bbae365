"""Cleans up what broken kernels leave behind, so that the next test does not find it."""

import os

import pytest
import torch
import torch._dynamo
from conformance.zoo import specimens, wrong
from torch.nn import functional

from fuseplug import torch_private
from fuseplug_testing import torch_private as of_the_kit


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    for names in (torch_private, of_the_kit):
        monkeypatch.setattr(names, "MISCOMPILES_FUNCTIONS", False)  # True would keep the kit from compiling anything
    torch.set_num_threads(1)
    state = torch.get_rng_state()
    replaced = (functional, "relu6"), (specimens, "rotate_half")
    held = [(owner, name, getattr(owner, name)) for owner, name in replaced]
    yield
    for owner, name, value in held:
        setattr(owner, name, value)
    if "extra_repr" in vars(specimens.CastLastNorm):
        del specimens.CastLastNorm.extra_repr
    for store in (wrong._seen, wrong._kept, wrong._workspace):
        store.clear()
    os.environ.pop("ZOO_WORKSPACE", None)
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(False)
    torch._dynamo.config.recompile_limit = 8
    torch.set_rng_state(state)
