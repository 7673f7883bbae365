"""What every recogniser of a recurrence must answer."""

import pytest
import torch
from support.recurrences import reference_manager
from support.thorough import thorough
from torch import nn

from fuseplug_gated_delta_rule.specimens import DeltaAttention
from fuseplug_selective_scan.specimens import Mixer as ScanMixer
from fuseplug_ssd.specimens import Mixer as ChunkScanMixer

MIXERS = {"gated_delta_rule": DeltaAttention, "selective_scan": ScanMixer, "ssd": ChunkScanMixer}
HIDDEN = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("module", [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), nn.Conv1d(4, 4, 3)])
@pytest.mark.parametrize("op", MIXERS)
def test_nothing_is_said_of_other_modules(op, module):
    assert not reference_manager(op).plan(module).report.entries


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, torch.bfloat16) for op in MIXERS),
        *(pytest.param(op, torch.float16, marks=thorough) for op in MIXERS if op != "selective_scan"),
    ],
    ids=str,
)
def test_modules_in_half_precision(op, dtype):
    module = MIXERS[op]().to(dtype)
    with reference_manager(op).apply_all(module) as applied:
        module(HIDDEN.to(dtype)).sum().backward()
        assert [(count.fused, count.original) for count in applied.calls()] == [(1, 0)]


@thorough
def test_a_selective_scan_in_float16_is_left_alone():
    """A model's scan keeps its states in float16, where they overflow; the kernel's states do not."""
    (entry,) = reference_manager("selective_scan").plan(ScanMixer().half()).report.entries
    assert "output[0] is finite elsewhere than the original's" in entry.why_not


@pytest.mark.parametrize("op", MIXERS)
def test_a_compiled_call_is_the_originals(op):
    module = MIXERS[op]()
    expected = module(HIDDEN)
    with reference_manager(op).apply_all(module) as applied:
        result = torch.compile(module, backend="eager", fullgraph=True)(HIDDEN)
        assert [count.fused for count in applied.calls()] == [0]
    assert torch.equal(result, expected)
