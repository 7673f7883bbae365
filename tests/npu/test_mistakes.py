"""Every known mistake in a kernel shows: by an error, by a missing gradient, or by numbers."""

from pathlib import Path

import pytest
import torch

from . import mistakes

# How each mistake shows on tensors with values, and on tensors without; None if it does not.
SEEN = {
    mistakes.EpsDropped: ("other numbers", None),
    mistakes.EpsMisnamed: ("RuntimeError: Unknown keyword argument 'eps' for operator 'npu::npu_rms_norm'",) * 2,
    mistakes.TupleKept: ("RuntimeError: npu::npu_moe_token_permute() Expected a value of type 'Tensor'",) * 2,
    mistakes.NormOfTheSum: ("RuntimeError: derivative for npu::npu_add_rms_norm is not implemented",) * 2,
    mistakes.HalvesSwapped: ("other numbers", None),
    mistakes.GateOfAView: ("ContractError: npu_swiglu: x must be contiguous",) * 2,
    mistakes.NoAutogradFunction: ("ContractError: npu_rms_norm_backward: dy must be a tensor; it is undefined",) * 2,
    mistakes.CountsAsEnds: ("ContractError: npu_grouped_matmul: group_list must be of sizes, or of ends", None),
    mistakes.CountsInInt32: ("ContractError: npu_grouped_matmul: group_list must be int64",) * 2,
    mistakes.CountsOnTheHost: (
        "RuntimeError: npu.npu_grouped_matmul.default: Expected all tensors to be on the same device",
        "FakeTensorDeviceMismatchError: Expected all tensors to be on the same device",
    ),
    mistakes.CountsThatWait: (None, "DynamicOutputShapeException: aten.bincount.default"),
    mistakes.LastExpertForgotten: ("other numbers", None),
    mistakes.UntransposedForX: ("other gradient", None),
    mistakes.UpstreamAsItComes: ("ContractError: npu_grouped_matmul: x must be contiguous",) * 2,
    mistakes.CopyOfXTransposed: ("ContractError: npu_grouped_matmul: x must be the transpose of a contiguous",) * 2,
    mistakes.RowsForTheWeight: ("ContractError: npu_grouped_matmul: weight must be [groups, in, out]",) * 2,
    mistakes.ProbsDropped: ("other numbers", "no gradient for probs"),
    mistakes.ProbsDetached: ("no gradient for probs",) * 2,
    mistakes.OrderForRows: ("other numbers", None),
    mistakes.RowsInInt64: ("ContractError: _npu_moe_token_unpermute: sorted_indices must be int32",) * 2,
}


def outcome(compute, device):
    tensors, indices = mistakes.inputs(device)
    result = compute(**tensors, indices=indices)
    upstream = torch.arange(result.numel(), device=device).view(result.shape) / 7
    gradients = torch.autograd.grad(result, list(tensors.values()), upstream, allow_unused=True)
    return result, dict(zip(tensors, gradients, strict=True))


def what_is_wrong(compute, *, values=True):
    """What is wrong with *compute*, in a few words; ``None`` if nothing is."""
    try:
        result, gradients = outcome(compute, "npu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if missing := [name for name, gradient in gradients.items() if gradient is None]:
        missing = f"no gradient for {', '.join(missing)}"
    if not values:
        return missing or None
    expected, theirs = outcome(mistakes.in_plain_torch, "cpu")
    if not torch.allclose(result.cpu(), expected, atol=1e-5):
        return "other numbers"
    if missing:
        return missing
    close = all(torch.allclose(gradients[name].cpu(), theirs[name], rtol=1e-4, atol=1e-4) for name in theirs)
    return None if close else "other gradient"


def test_every_mistake_is_listed():
    assert set(SEEN) == {
        cls for cls in vars(mistakes).values() if isinstance(cls, type) and mistakes.Right in cls.__bases__
    }


def test_the_page_says_how_many_are_seen():
    page = (Path(__file__).parents[2] / "docs" / "test-without-an-npu.md").read_text()
    with_values, without = (sum(seen is not None for seen in column) for column in zip(*SEEN.values(), strict=True))
    assert (len(SEEN), with_values, without) == (20, 19, 14)
    assert "twenty known mistakes" in page
    assert "`host_npu` finds nineteen" in page
    assert "`fake_npu` finds fourteen" in page


def test_what_is_right_is_right(host_npu):
    assert what_is_wrong(mistakes.Right()) is None
    assert host_npu.calls["npu_grouped_matmul"] == 6


def test_what_is_right_is_right_without_values(fake_npu):
    assert what_is_wrong(mistakes.Right(), values=False) is None


@pytest.mark.parametrize("mistake", SEEN, ids=lambda cls: cls.__name__)
def test_a_mistake_is_seen_where_there_are_values(host_npu, mistake):
    assert is_seen(what_is_wrong(mistake()), SEEN[mistake][0])


@pytest.mark.parametrize("mistake", SEEN, ids=lambda cls: cls.__name__)
def test_a_mistake_is_seen_without_values_unless_only_they_tell(fake_npu, mistake):
    assert is_seen(what_is_wrong(mistake(), values=False), SEEN[mistake][1])


def is_seen(found, expected):
    return found is None if expected is None else (found or "nothing").startswith(expected)
