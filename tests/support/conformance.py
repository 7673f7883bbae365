"""The conformance kit on a part of what a kernel claims, which a run of all tests has time for."""

from __future__ import annotations

from fuseplug import KernelManager
from fuseplug.hookspecs import resolve
from fuseplug_testing import Conformance, check_kernel
from fuseplug_testing.kit import CHECKS


def check_some(kernel_id: str, every: int = 8) -> Conformance:
    """Check an installed kernel on some of its specimens: each takes seconds, and every variant has tests of its own.

    ``nox -s conformance`` checks all kernels on all of them.
    """
    (kernel,) = (record.kernel for record in KernelManager(environ={}).kernels() if record.kernel_id == kernel_id)
    specimens = resolve(kernel.specimens)()[::every]
    checks = [check.name for check in CHECKS if check.name != "variants"]  # which wants every one of them
    result = check_kernel(kernel, specimens, checks=checks)
    declined = {skip.where for skip in result.skipped if skip.why.startswith("declined")}
    assert result.passed["specimens"] == len(specimens) - len(declined)
    return result
