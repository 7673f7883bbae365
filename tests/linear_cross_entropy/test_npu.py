"""What is specific to the loss on NPUs: how many kernels a chunk launches, and that the host waits for none."""

from collections import Counter

import pytest
import torch
from support.losses import ids, language_model
from support.managers import manager_of
from support.trainer_head import add_head
from support.vocabularies import BF16, DOUBLE, SMOOTHED, TOKENS, WORDS, both, labels_for, tensors

from fuseplug_linear_cross_entropy.backends import chunks, npu
from fuseplug_linear_cross_entropy.kernels import NpuLinearCrossEntropyKernel
from fuseplug_linear_cross_entropy.reference import scaled, softcapped
from fuseplug_tools.integrations.heads import serve


@pytest.fixture
def cut(monkeypatch):
    """Sets how many tokens a chunk has, and how many a piece of it has."""

    def into(chunk, piece):
        monkeypatch.setattr(npu, "rows_of_chunk", lambda *_: chunk)
        monkeypatch.setattr(npu, "WORKING", piece * WORDS * 4)

    return into


@pytest.mark.usefixtures("host_npu")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_head_that_a_trainer_put_on_a_model_is_served(dtype):
    model = language_model().to("npu", dtype)
    before, tokens = add_head(model), ids().to("npu")

    def scored():
        model.zero_grad()
        results = model(input_ids=tokens, labels=tokens, scored=True)
        (results["log_probs"].sum() + 0.3 * results["entropy"].sum()).backward()
        return [value.detach().float().cpu() for value in (*results.values(), model.lm_head.weight.grad)]

    true = scored()
    (head,) = serve(model, manager_of(NpuLinearCrossEntropyKernel))
    for value, expected in zip(scored(), true, strict=True):
        torch.testing.assert_close(
            value, expected, rtol=0, atol=(0.05 if dtype is BF16 else 1e-4) * expected.abs().max().item()
        )
    assert (head.kernel_id, head.counter.fused, head.counter.reasons) == ("npu_fused_linear_cross_entropy", 1, {})
    head.undo()
    assert vars(model)["forward"] is before


def launches(host_npu, dtype, name="linear_cross_entropy", **options):
    """What a forward launches, and what its backward launches."""
    arguments = {name: t.to("npu").requires_grad_() for name, t in tensors(dtype).items()}
    labels = labels_for().to("npu")
    host_npu.calls.clear()
    results = getattr(npu, name)(*arguments.values(), labels, **options)
    results = (results,) if isinstance(results, torch.Tensor) else results
    forward = host_npu.calls.copy()
    upstream = [torch.ones_like(result) for result in results]
    host_npu.calls.clear()
    torch.autograd.grad(results, list(arguments.values()), upstream)
    return forward, host_npu.calls.copy()


def counter(**calls):
    return Counter({f"aten::{name}": count for name, count in calls.items()})


def times(count, calls):
    return Counter({name: count * number for name, number in calls.items()})


ONCE = counter(eq=1, clamp=1, ne=2, sum=2, _to_copy=1, reciprocal=1, clone=2, masked_fill_=4, mul=1, neg=1) + counter(
    cat=1, mul_=1, div=1
)
PIECE = counter(_to_copy=1, _log_softmax=1, gather=1, exp_=1, mul_=1, scatter_add_=1, copy_=1)
SCALED = counter(_to_copy=1, mul=1, copy_=1)
SUM_SCALED = counter(mul=1, copy_=1)


def test_a_mean_launches_what_the_docstring_says(host_npu):
    forward, backward = launches(host_npu, BF16)
    assert forward == ONCE + PIECE + counter(mm=3)
    assert backward == times(2, SCALED)
    assert (ONCE.total(), PIECE.total(), SCALED.total(), SUM_SCALED.total()) == (19, 7, 3, 2)


def test_several_chunks_add_in_float32(host_npu, cut, monkeypatch):
    cut(4, 2)
    monkeypatch.setattr(chunks, "_WORDS", 25)
    forward, backward = launches(host_npu, BF16)
    assert forward == ONCE + times(4, PIECE) + counter(mm=4) + counter(mm=4, copy_=2, add_=2)
    assert backward == SCALED + SUM_SCALED


@pytest.mark.parametrize(
    ("options", "more"),
    [({"steps": scaled(0.5)}, 1), ({"steps": softcapped(3.0)}, 5), ({"label_smoothing": 0.1}, 2)],
    ids=str,
)
def test_a_piece_launches_few_more_for_a_factor_a_cap_or_smoothing(host_npu, cut, options, more):
    counts = []
    for pieces in (TOKENS, 1):
        cut(TOKENS, -(-TOKENS // pieces))
        counts.append(launches(host_npu, BF16, **options)[0].total())
    assert (counts[0] - counts[1]) / (TOKENS - 1) == PIECE.total() + more


@pytest.mark.parametrize(("reduction", "passes"), [("mean", 1), ("none", 2)])
def test_the_probabilities_are_computed_once_if_the_upstream_gradient_is_known(host_npu, cut, reduction, passes):
    cut(4, 3)
    forward, backward = launches(host_npu, BF16, reduction=reduction)
    assert (forward + backward)["aten::_log_softmax"] == 3 * passes


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_logprob"])
def test_the_host_waits_for_nothing(host_npu, cut, name):
    cut(4, 2)
    every = [{"reduction": reduction, "label_smoothing": smoothing} for reduction, smoothing in SMOOTHED]
    waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
    torch.ones((), device="npu").item()
    assert host_npu.calls.keys() & waits
    for options in every if name == "linear_cross_entropy" else [{"entropy": True}]:
        for calls in launches(host_npu, BF16, name, **options):
            assert not calls.keys() & waits


def test_no_gradient_is_made_where_none_is_wanted(host_npu):
    arguments = [t.to("npu").requires_grad_() for t in tensors(BF16).values()]
    host_npu.calls.clear()
    with torch.no_grad():
        both(npu, "linear_cross_entropy")[0](*arguments)
    assert host_npu.calls["aten::mm"] == 1
    assert "aten::exp_" not in host_npu.calls


def test_a_gradient_is_scaled_in_float32_and_rounded_once(host_npu):
    gradient, third = torch.tensor([3.0, 5.0], dtype=BF16), torch.tensor(1 / 3)
    expected = (gradient.float() * third).to(BF16)
    assert not torch.equal(gradient * third.to(BF16), expected)
    assert torch.equal(npu._scale(gradient.to("npu"), third.to("npu"), BF16).cpu(), expected)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [(tensors(DOUBLE), ()), (tensors(), (*softcapped(3.0), *softcapped(3.0)))],
    ids=["float64", "two caps"],
)
def test_what_is_not_served_is_the_reference(host_npu, arguments, steps):
    both(npu, "linear_cross_entropy", steps=steps)[0](**{name: t.to("npu") for name, t in arguments.items()})
    assert "aten::scatter_add_" not in host_npu.calls
