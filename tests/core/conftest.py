"""Fixtures and settings that the tests of core share."""

import torch
from support.fixtures import (  # noqa: F401 - pytest finds them here
    as_it_was,
    as_on_other_releases,
    checked_once,
    distribution,
    examined_once,
    fresh_python,
    fusing,
    manager,
    model,
    package,
    run,
    site,
)

torch.set_num_threads(1)  # the tensors are small, and several runs share few cores
