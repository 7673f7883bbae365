"""The conformance kit: is this kernel right, in every way in which kernels are wrong?

>>> from fuseplug_testing import check_kernel
>>> print(check_kernel(MyKernel))  # doctest: +SKIP

For an installed kernel, run ``pytest --fuseplug-kernel my_kernel``. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

from .results import Conformance, ConformanceError, Fault, Skip

if TYPE_CHECKING:
    from .kit import check_kernel

__all__ = ["Conformance", "ConformanceError", "Fault", "Skip", "check_kernel"]


__getattr__, __dir__ = lazy(__name__, {"check_kernel": ".kit"})
