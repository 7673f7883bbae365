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
    module = resolve(GatedDeltaRuleKernel.specimens)()[number].to(backend.device)
    hidden = torch.randn(2, 70, 8).to(backend.device)
    before = module(hidden)
    with backend.manager("gated_delta_rule").apply_all(module) as applied:
        assert [(str(entry.target), entry.variant, entry.check) for entry in applied.report.fused] == [
            ("forward:chunk_delta_attention", "channel", "passed")
            if number == 2
            else ("forward:chunk_gated_delta_rule", "head", "passed")
        ], applied.report
        # Of the two proposals, only the one that fits is reported.
        assert not applied.report.fused[0].rejections + applied.report.fused[0].outranked
        torch.testing.assert_close(module(hidden), before, rtol=1e-4, atol=1e-5)
        with torch.autocast(backend.device, torch.bfloat16):
            module(hidden).sum().backward()
        assert [(count.fused, count.original) for count in applied.calls()] == [(2, 0)]
    assert torch.equal(module(hidden), before)
