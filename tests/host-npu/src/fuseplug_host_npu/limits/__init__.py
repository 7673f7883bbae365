"""What the documentation of torch_npu's ops asks of their arguments, for training chips (Atlas A2 and A3).

The pages are those of the op-plugin repository, ``docs/zh/custom_APIs/torch_npu``; for some ops there is only the
docstring that torch_npu gives them.
"""

from .checking import check
from .registry import limit, require

__all__ = ["check", "limit", "require"]
