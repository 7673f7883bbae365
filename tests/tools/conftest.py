"""Fixtures for the tests of the tools."""

import torch
from support.fixtures import (  # noqa: F401 - pytest finds them here
    as_it_was,
    as_on_other_releases,
    distribution,
    fresh_python,
    fusing,
    manager,
    model,
    package,
    run,
    site,
)

torch.set_num_threads(1)  # tensors are small, and several runs share few cores
