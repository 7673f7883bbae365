"""What apply_all makes of chunk scans, with each backend."""

from __future__ import annotations

import pytest
import torch
from support.thorough import first_quick

from fuseplug.hookspecs import resolve
from fuseplug_ssd.kernels import SSDKernel

pytestmark = pytest.mark.usefixtures("small_checks")


@pytest.mark.parametrize("number", first_quick([0, 1]))
def test_modules_are_fused_and_undone(backend, number):
    torch.manual_seed(0)
    module = resolve(SSDKernel.specimens)()[number]
    report = backend.assert_fused_and_undone("ssd", module, torch.randn(2, 40, 8))
    assert [(str(entry.target), entry.check) for entry in report.fused] == [("forward:chunk_scan", "passed")], report
