"""A kernel whose function is the reference, so that what is found can be tested without computing in chunks."""

from __future__ import annotations

import pytest
from support.managers import manager_of

from fuseplug_gated_delta_rule.kernels import GatedDeltaRuleKernel


class ReferenceDeltaRule(GatedDeltaRuleKernel):
    kernel_id = "reference_gated_delta_rule"
    function = "fuseplug_gated_delta_rule.reference:gated_delta_rule"
    check_sizes = (1 << 7,)


@pytest.fixture(name="manager")
def _manager():
    return manager_of(ReferenceDeltaRule)
