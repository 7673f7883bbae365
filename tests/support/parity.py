"""A model fused and unfused: one step of each, and the step after undo."""

import torch

ROUNDINGS = {torch.float32: 16, torch.bfloat16: 4}
"""By how many roundings a result may be off, as a share of its size."""

INEXACT = ("linear_attn.A_log", "linear_attn.dt_bias")
"""Parameters of decays in Qwen3-Next: in the unfused model, their gradients have lost two digits in float32.

tests/recurrences/test_transformers.py compares them with the formula in float64 instead.
"""


def assert_parity(manager, model, step, **options):
    """Assert that the tensors of *step* are as near to the truth fused as unfused, and the same bits after undo.

    *step* gives tensors by name. In half precision, the truth is the unfused model in float32, and *model* is left in
    float32. *options* are for ``apply_all``. Returns the report of what was fused.
    """
    dtype = next(model.parameters()).dtype
    before = step(model)
    with manager.apply_all(model, **options) as applied:
        assert applied.report.fused
        fused = step(model)
    after = step(model)
    truth = before if dtype is torch.float32 else step(model.float())

    assert fused.keys() == before.keys()
    for key, unfused in before.items():
        assert (fused[key].dtype, fused[key].shape) == (unfused.dtype, unfused.shape)
        allowed = 2 * distance(unfused, truth[key]) + ROUNDINGS[dtype] * torch.finfo(dtype).eps * (
            32 if key.endswith(INEXACT) else 1
        )
        assert distance(fused[key], truth[key]) <= allowed, key
        assert torch.equal(after[key], unfused)
    return applied.report


def distance(found, true):
    """How far *found* is from *true*, as a share of its size."""
    return ((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30)).item()
