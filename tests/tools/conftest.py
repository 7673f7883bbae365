"""What the tests of the tools share."""

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

torch.set_num_threads(1)  # small tensors, and several runs at once on few cores
