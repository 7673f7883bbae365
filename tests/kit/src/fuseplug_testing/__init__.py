"""The conformance kit: is this kernel right, in every way in which kernels are wrong?

>>> from fuseplug_testing import check_kernel
>>> print(check_kernel(MyKernel))  # doctest: +SKIP

or, for a kernel that is installed, ``pytest --fuseplug-kernel my_kernel``. Importing this imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .results import Conformance, ConformanceError, Fault, Skip

if TYPE_CHECKING:
    from .kit import check_kernel

__all__ = ["Conformance", "ConformanceError", "Fault", "Skip", "check_kernel"]


def __getattr__(name: str) -> Any:
    if name == "check_kernel":
        from .kit import check_kernel

        return check_kernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
