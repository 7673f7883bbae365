"""What the tests of core share."""

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

torch.set_num_threads(1)  # small tensors, and several runs at once on few cores
