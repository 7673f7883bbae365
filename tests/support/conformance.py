"""The conformance kit on part of what a kernel claims, small enough for a run of all tests."""

from __future__ import annotations

from typing import Any

import pytest

from fuseplug import KernelManager
from fuseplug.hookspecs import resolve
from fuseplug_testing import Conformance, check_kernel
from fuseplug_testing.kit import CHECKS

from .thorough import thorough

OPS = ("moe", "swiglu", "rope", "rmsnorm", "linear_cross_entropy")


def some(quick: set[str], every: int) -> list[Any]:
    """Pairs of an op and the step between its checked specimens, for ``parametrize``; ``None`` checks only the first.

    Args:
        quick: The ops whose first specimen is checked in the quick half of the tests.
        every: The step from one specimen to the next in the thorough half, for each op.
    """
    first = [pytest.param(op, None, id=f"{op}-one specimen") for op in OPS if op in quick]
    return [*first, *(pytest.param(op, every, id=f"{op}-some", marks=thorough) for op in OPS)]


def check_some(kernel_id: str, every: int | None) -> Conformance:
    """Check an installed kernel on some of its specimens: each takes seconds, and every variant has tests of its own.

    If *every* is ``None``, only the first specimen is checked, and its sizes are not: these compile the most.
    ``nox -s conformance`` checks all kernels on all specimens.
    """
    (kernel,) = (record.kernel for record in KernelManager(environ={}).kernels() if record.kernel_id == kernel_id)
    specimens = resolve(kernel.specimens)()
    specimens = specimens[:1] if every is None else specimens[::every]
    left_out = {"variants"} if every else {"variants", "sizes"}  # the first of these needs all specimens
    checks = [check.name for check in CHECKS if check.name not in left_out]
    result = check_kernel(kernel, specimens, checks=checks)
    declined = {skip.where for skip in result.skipped if skip.why.startswith("declined")}
    assert result.passed["specimens"] == len(specimens) - len(declined)
    return result
