"""The limits that the documentation of torch_npu's ops sets for their arguments, on training chips (Atlas A2 and A3).

The pages are in the op-plugin repository, ``docs/zh/custom_APIs/torch_npu``. For some ops, the only documentation is
the docstring that torch_npu gives them.
"""

from .checking import check
from .registry import limit, require

__all__ = ["check", "limit", "require"]
