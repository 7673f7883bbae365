"""What the documentation of torch_npu's ops asks of their arguments, for training chips (Atlas A2 and A3).

The pages are those of the op-plugin repository, ``docs/zh/custom_APIs/torch_npu``; for some ops there is only the
docstring that torch_npu gives them.
"""

from __future__ import annotations

import functools


@functools.cache
def load_all() -> None:
    """Import every table of limits, whose rows enter themselves."""
    from . import activations, grouped_matmul, moe, norms, rotary  # noqa: F401
