"""What `apply_all` does with the specimens of recurrences, on each backend."""

import pytest
import torch
from support.recurrences import rows
from support.thorough import quick_if

from fuseplug_gated_delta_rule.specimens import specimens as delta_rules
from fuseplug_selective_scan.specimens import specimens as scans
from fuseplug_ssd.specimens import specimens as chunk_scans

pytestmark = pytest.mark.usefixtures("small_checks")

SPECIMENS = {
    "scan-0": ("selective_scan", scans, 0, "selective_scan", "s6"),  # the other has a float32 step under autocast
    **{f"chunks-{n}": ("ssd", chunk_scans, n, "chunk_scan", "mamba2") for n in (0, 1)},
    **{f"head-{n}": ("gated_delta_rule", delta_rules, n, "chunk_gated_delta_rule", "head") for n in (0, 1)},
    "channel-2": ("gated_delta_rule", delta_rules, 2, "chunk_delta_attention", "channel"),
}
"""For each name: the op, its specimens, the index of one, the function that it looks up, and the variant."""
HERE = {row.op for row in rows().values()}


@pytest.mark.parametrize(
    "name",
    quick_if(
        (name for name, specimen in SPECIMENS.items() if specimen[0] in HERE),
        ("scan-0", "chunks-0", "head-0", "channel-2"),
    ),
)
def test_modules_are_fused_and_undone(backend, name):
    op, specimens, number, function, variant = SPECIMENS[name]
    torch.manual_seed(0)
    report = backend.assert_fused_and_undone(op, specimens()[number], torch.randn(2, 70, 8))
    assert [(str(entry.target), entry.variant, entry.check) for entry in report.fused] == [
        (f"forward:{function}", variant, "passed")
    ], report
    # Of several proposals, only the one that fits is reported.
    assert not report.fused[0].rejections + report.fused[0].outranked
