"""What apply_all makes of gated delta rules, with each backend."""

from __future__ import annotations

import pytest
import torch
from support.thorough import first_quick

from fuseplug.hookspecs import resolve
from fuseplug_gated_delta_rule.kernels import GatedDeltaRuleKernel

pytestmark = pytest.mark.usefixtures("small_checks")


@pytest.mark.parametrize("number", first_quick([0, 2, 1], 2))
def test_modules_are_fused_and_undone(backend, number):
    torch.manual_seed(0)
    module = resolve(GatedDeltaRuleKernel.specimens)()[number]
    report = backend.assert_fused_and_undone("gated_delta_rule", module, torch.randn(2, 70, 8))
    assert [(str(entry.target), entry.variant, entry.check) for entry in report.fused] == [
        ("forward:chunk_delta_attention", "channel", "passed")
        if number == 2
        else ("forward:chunk_gated_delta_rule", "head", "passed")
    ], report
    # Of the two proposals, only the one that fits is reported.
    assert not report.fused[0].rejections + report.fused[0].outranked
