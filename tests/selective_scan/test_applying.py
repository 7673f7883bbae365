"""What apply_all makes of selective scans, with each backend."""

from __future__ import annotations

import pytest
import torch
from support.thorough import first_quick

from fuseplug.hookspecs import resolve
from fuseplug_selective_scan.kernels import SelectiveScanKernel

pytestmark = pytest.mark.usefixtures("small_checks")


@pytest.mark.parametrize("number", first_quick([0, 1]))
def test_modules_are_fused_and_undone(backend, number):
    torch.manual_seed(0)
    module = resolve(SelectiveScanKernel.specimens)()[number]
    report = backend.assert_fused_and_undone("selective_scan", module, torch.randn(2, 40, 8))
    assert [(str(entry.target), entry.check) for entry in report.fused] == [("forward:selective_scan", "passed")], (
        report
    )
