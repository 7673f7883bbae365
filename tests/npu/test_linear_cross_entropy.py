"""The loss on an NPU in host memory: right in every form, for any number of chunks and pieces, and in few launches."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from support.judging import assert_right, outcome
from support.thorough import covering
from support.vocabularies import (
    BF16,
    DOUBLE,
    DTYPES,
    HALF,
    HIDDEN,
    REDUCTIONS,
    SINGLE,
    SMOOTHED,
    STEPS,
    TOKENS,
    WORDS,
    both,
    labels_for,
    tensors,
    tolerance,
)

from fuseplug import KernelManager
from fuseplug_linear_cross_entropy.backends import chunks, npu
from fuseplug_linear_cross_entropy.reference import FLOAT, Step, scaled, softcapped
from fuseplug_linear_cross_entropy.specimens import VOCABULARY, Softcapped

CUTS = {"one chunk": (7, 7), "pieces": (7, 3), "chunks": (3, 3), "chunks of pieces": (4, 3), "a token each": (1, 1)}
"""Tokens of a chunk, and of a piece of one."""

PIECES = {"one chunk": 1, "pieces": 3, "chunks": 3, "chunks of pieces": 3, "a token each": 7}


def losses(labels=None, **options):
    return both(npu, "linear_cross_entropy", labels, **options)


def logprobs(labels=None, **options):
    return both(npu, "linear_logprob", labels, **options)


@pytest.fixture
def cut(monkeypatch):
    def into(chunk, piece, itemsize=4, words=WORDS):
        monkeypatch.setattr(npu, "BUDGET", chunk * words * itemsize)
        monkeypatch.setattr(npu, "WORKING", piece * words * 4)

    return into


@pytest.mark.parametrize(
    ("steps", "smoothed", "bias", "dtype", "cuts"),
    covering(itertools.product(STEPS, SMOOTHED, (False, True), DTYPES, CUTS)),
    ids=str,
)
def test_losses(host_npu, cut, steps, smoothed, bias, dtype, cuts):
    reduction, smoothing = smoothed
    cut(*CUTS[cuts], dtype.itemsize)
    how = {"steps": STEPS[steps], "reduction": reduction, "label_smoothing": smoothing}
    assert_right(*losses(**how), tensors(dtype, bias), tolerance(dtype))
    known = reduction != "none" and dtype is not HALF
    assert host_npu.calls["aten::_log_softmax"] == PIECES[cuts] * (1 if known else 2)


@pytest.mark.parametrize(
    ("steps", "entropy", "bias", "dtype", "cuts"),
    covering(itertools.product(STEPS, (False, True), (False, True), DTYPES, CUTS)),
    ids=str,
)
def test_log_probabilities(host_npu, cut, steps, entropy, bias, dtype, cuts):
    cut(*CUTS[cuts], dtype.itemsize)
    assert_right(*logprobs(steps=STEPS[steps], entropy=entropy), tensors(dtype, bias), tolerance(dtype))
    assert host_npu.calls["aten::_log_softmax"] == 2 * PIECES[cuts]


def launches(host_npu, dtype, name="linear_cross_entropy", **options):
    """What a forward and a backward launch, each by itself."""
    given = {each: t.to("npu").requires_grad_() for each, t in tensors(dtype).items()}
    labels = labels_for().to("npu")
    host_npu.calls.clear()
    results = getattr(npu, name)(*given.values(), labels, **options)
    results = (results,) if isinstance(results, torch.Tensor) else results
    forward = host_npu.calls.copy()
    upstream = [torch.ones_like(each) for each in results]
    host_npu.calls.clear()
    torch.autograd.grad(results, list(given.values()), upstream)
    return forward, host_npu.calls.copy()


def counter(**calls):
    return Counter({f"aten::{name}": count for name, count in calls.items()})


ONCE = counter(eq=1, clamp=1, ne=2, sum=2, _to_copy=1, reciprocal=1, clone=2, masked_fill_=4, mul=1, neg=1) + counter(
    cat=1, mul_=1, div=1
)
PIECE = counter(_to_copy=1, _log_softmax=1, gather=1, exp_=1, mul_=1, scatter_add_=1, copy_=1)
SCALED = counter(_to_copy=1, mul=1, copy_=1)


def times(count, calls):
    return Counter({name: count * number for name, number in calls.items()})


class TestLaunches:
    def test_of_a_mean_are_those_of_the_docstring(self, host_npu):
        forward, backward = launches(host_npu, BF16)
        assert forward == ONCE + PIECE + counter(mm=3)
        assert backward == times(2, SCALED)
        assert (ONCE.total(), PIECE.total(), SCALED.total()) == (19, 7, 3)

    def test_of_several_chunks_add_in_float32(self, host_npu, cut, monkeypatch):
        cut(4, 2, 2)
        monkeypatch.setattr(chunks, "_WORDS", 25)
        forward, _ = launches(host_npu, BF16)
        of_weight = counter(mm=4, copy_=2, add_=2) + counter(copy_=1)
        assert forward == ONCE + times(4, PIECE) + counter(mm=4) + of_weight

    @pytest.mark.parametrize(
        ("options", "more"),
        [
            ({"steps": scaled(0.5)}, 1),
            ({"steps": softcapped(3.0)}, 5),
            ({"label_smoothing": 0.1}, 2),
        ],
        ids=str,
    )
    def test_of_a_piece_are_few_more_for_a_factor_a_cap_or_smoothing(self, host_npu, cut, options, more):
        counts = []
        for pieces in (TOKENS, 1):
            cut(TOKENS, -(-TOKENS // pieces), 2)
            counts.append(launches(host_npu, BF16, **options)[0].total())
        assert (counts[0] - counts[1]) / (TOKENS - 1) == PIECE.total() + more

    @pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_logprob"])
    def test_none_waits_for_the_device(self, host_npu, cut, name):
        cut(4, 2, 2)
        every = [{"reduction": reduction, "label_smoothing": smoothing} for reduction, smoothing in SMOOTHED]
        waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
        torch.ones((), device="npu").item()
        assert host_npu.calls.keys() & waits
        for options in every if name == "linear_cross_entropy" else [{"entropy": True}]:
            for calls in launches(host_npu, BF16, name, **options):
                assert not calls.keys() & waits

    def test_no_gradient_is_made_where_none_is_wanted(self, host_npu):
        given = [t.to("npu").requires_grad_() for t in tensors(BF16).values()]
        host_npu.calls.clear()
        with torch.no_grad():
            assert losses()[0](*given).grad_fn is None
        assert host_npu.calls["aten::mm"] == 1
        assert "aten::exp_" not in host_npu.calls


VIEWS = {
    "hidden is transposed": ("hidden", (HIDDEN, TOKENS), lambda t: t.t()),
    "hidden is a part of wider rows": ("hidden", (TOKENS, HIDDEN + 3), lambda t: t[:, :HIDDEN]),
    "hidden is every other column": ("hidden", (TOKENS, 2 * HIDDEN), lambda t: t[:, ::2]),
    "weight is transposed": ("weight", (HIDDEN, WORDS), lambda t: t.t()),
    "weight is every other column": ("weight", (WORDS, 2 * HIDDEN), lambda t: t[:, ::2]),
    "bias is every other number": ("bias", (2 * WORDS,), lambda t: t[::2]),
}


class TestArguments:
    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_need_not_be_contiguous(self, host_npu, cut, reduction, view):
        cut(4, 2)
        name, shape, seen = VIEWS[view]
        given = tensors(bias=True) | {name: torch.randn(shape)}

        def viewed(function):
            return lambda **given: function(**given | {name: seen(given[name])})

        ours, theirs = map(viewed, losses(reduction=reduction))
        assert_right(ours, theirs, given, tolerance(SINGLE))
        assert host_npu.calls["aten::_log_softmax"]

    def test_labels_need_not_be_contiguous(self, host_npu):
        labels = labels_for(2 * TOKENS)[::2]
        assert not labels.is_contiguous()
        assert_right(*losses(labels), tensors(), tolerance(SINGLE))

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_hidden_may_be_made_of_the_weight(self, host_npu, reduction):
        def tied(function):
            return lambda weight: function(weight[:TOKENS].sin(), weight)

        ours, theirs = map(tied, losses(reduction=reduction))
        assert_right(ours, theirs, {"weight": tensors()["weight"]}, tolerance(SINGLE))

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("needs", [n for n in itertools.product((False, True), repeat=3) if any(n)], ids=str)
    def test_only_the_gradients_that_are_wanted_are_made(self, host_npu, needs, reduction):
        ours, theirs = losses(reduction=reduction)
        found = []
        for function, device in ((ours, "npu"), (theirs, "cpu")):
            given = [
                t.to(device).requires_grad_(need) for t, need in zip(tensors(bias=True).values(), needs, strict=True)
            ]
            host_npu.calls.clear()
            loss = function(*given).sum()
            found.append([t.cpu() for t in torch.autograd.grad(loss, [t for t in given if t.requires_grad])])
            if device == "npu":
                assert host_npu.calls["aten::mm"] == sum(needs[:2])
                assert host_npu.calls["aten::addmm"] == (1 if reduction == "mean" else 2)
        torch.testing.assert_close(*found)


class TestTheBackward:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_may_be_run_twice(self, host_npu, dtype, reduction):
        given = [t.to("npu").requires_grad_() for t in tensors(dtype).values()]
        loss = losses(reduction=reduction)[0](*given)
        first = torch.autograd.grad(loss.sum(), given, retain_graph=True)
        before = [t.to("cpu", copy=True) for t in first]
        for t in first:
            t.zero_()  # what was given is the caller's
        again = torch.autograd.grad(loss.sum() * 2, given)
        torch.testing.assert_close([t.cpu() for t in again], [2 * t for t in before])

    def test_scales_in_float32_and_rounds_once(self, host_npu):
        gradient, third = torch.tensor([3.0, 5.0], dtype=BF16), torch.tensor(1 / 3)
        expected = (gradient.float() * third).to(BF16)
        assert not torch.equal(gradient * third.to(BF16), expected)
        assert torch.equal(npu._scale(gradient.to("npu"), third.to("npu")).cpu(), expected)

    def test_keeps_what_is_small_in_float16_if_the_loss_is_scaled(self, host_npu):
        hidden = torch.zeros(2, HIDDEN, dtype=HALF)
        hidden[:, 0] = 1
        weight = torch.zeros(3, HIDDEN, dtype=HALF)
        weight[0, 0] = 18  # so that the others have a probability of 1.5e-8, which is 0 in float16
        weight = weight.to("npu").requires_grad_()
        labels = torch.zeros(2, dtype=torch.int64, device="npu")
        loss = npu.linear_cross_entropy(hidden.to("npu"), weight, labels)
        (found,) = torch.autograd.grad(loss * 2.0**16, weight)
        torch.testing.assert_close(found.cpu()[1, 0].item(), 2.0**16 * math.exp(-18), rtol=2e-3, atol=0)

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_may_be_differentiated_again(self, host_npu, reduction):
        ours, theirs = losses(reduction=reduction)
        found = []
        for function, device in ((ours, "npu"), (theirs, "cpu")):
            given = [t.to(device).requires_grad_() for t in tensors(bias=True).values()]
            first = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
            second = torch.autograd.grad(sum(t.sin().sum() for t in first), given)
            found.append([t.cpu() for t in second])
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


class TestWhatIsExtreme:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_all_labels_ignored(self, host_npu, reduction, smoothing):
        labels = torch.full((TOKENS,), -100)
        ours, theirs = losses(labels, reduction=reduction, label_smoothing=smoothing)
        found, expected = outcome(ours, tensors(), "npu").on_cpu(), outcome(theirs, tensors()).values
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)

    @pytest.mark.parametrize("what", [math.nan, math.inf])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_an_ignored_token_may_be_anything(self, host_npu, reduction, what):
        given = tensors()
        given["hidden"][2] = what
        ours, theirs = losses(reduction=reduction)
        found = ours(**{name: t.to("npu") for name, t in given.items()}).cpu()
        torch.testing.assert_close(found, theirs(**given))
        assert found.isfinite().all()

    @pytest.mark.parametrize("label", [-1, WORDS, 1 << 40])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_a_label_outside_of_the_vocabulary_makes_its_token_nan(self, host_npu, reduction, label):
        labels = labels_for()
        labels[1] = label
        given = [t.to("npu").requires_grad_() for t in tensors().values()]
        loss = losses(labels, reduction=reduction)[0](*given)
        of_hidden, _ = torch.autograd.grad(loss.sum(), given)
        assert of_hidden.cpu().isnan().any(-1).nonzero().flatten().tolist() == [1]
        found = loss.detach().cpu().isnan()
        assert found.nonzero().flatten().tolist() == [1] if reduction == "none" else found

    @pytest.mark.parametrize("entropy", [False, True])
    def test_a_word_that_cannot_be_costs_nothing(self, host_npu, entropy):
        given = tensors(bias=True)
        given["bias"][[0, 7, 40]] = -math.inf
        labels = labels_for()
        labels[labels == 0] = 3
        ours, theirs = logprobs(labels, entropy=entropy)
        found, expected = outcome(ours, given, "npu").on_cpu(), outcome(theirs, given).values
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert all(value.isfinite().all() for value in found.values())

    @pytest.mark.parametrize("ignore_index", [0, 3])
    def test_any_label_may_be_the_one_that_is_ignored(self, host_npu, ignore_index):
        labels = labels_for()
        labels[labels == -100] = ignore_index
        assert_right(*losses(labels, ignore_index=ignore_index), tensors(), tolerance(SINGLE))
        assert_right(*logprobs(labels, ignore_index=ignore_index, entropy=True), tensors(), tolerance(SINGLE))


class TestWhereTheReferenceRuns:
    @pytest.mark.parametrize(
        ("given", "options"),
        [
            (tensors(DOUBLE), {}),
            (tensors(tokens=0), {}),
            (tensors(), {"steps": (*softcapped(3.0), *softcapped(3.0))}),
        ],
        ids=["float64", "no token", "two caps"],
    )
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_what_is_not_served(self, host_npu, given, options, reduction):
        labels = labels_for(len(given["hidden"])) if len(given["hidden"]) else torch.zeros(0, dtype=torch.int64)
        ours, theirs = losses(labels, reduction=reduction, **options)
        found, expected = outcome(ours, given, "npu").on_cpu(), outcome(theirs, given).values
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert "aten::scatter_add_" not in host_npu.calls

    def test_errors_are_those_of_the_reference(self, host_npu):
        with pytest.raises(ValueError, match="unknown step"):
            losses(steps=(Step("round"),))[0](**{name: t.to("npu") for name, t in tensors().items()})

    @pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
    def test_under_autocast_the_dtypes_are_those_of_the_reference(self, host_npu, dtype):
        found = []
        for function, device in zip(losses(), ("npu", "cpu"), strict=True):
            given = [t.to(device, dtype).requires_grad_() for t in tensors().values()]
            with torch.autocast(device, dtype=BF16):
                loss = function(*given)
                grads = torch.autograd.grad(loss, given)
            found.append([t.detach().cpu() for t in (loss, *grads)])
        assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]] == [SINGLE, dtype, dtype]
        torch.testing.assert_close(*found, rtol=0.03, atol=0.01)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_inside_torch_compile(self, host_npu, reduction):
        torch.compiler.reset()
        ours, theirs = losses(reduction=reduction)
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        assert_right(compiled, theirs, tensors(), tolerance(SINGLE))
        assert "aten::scatter_add_" not in host_npu.calls

    @pytest.mark.parametrize("steps", [(FLOAT,), ()])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(self, fake_npu, reduction, steps):
        ours, theirs = losses(reduction=reduction, steps=steps)
        for dtype in DTYPES:
            values = [outcome(function, tensors(dtype, True), "npu").values for function in (ours, theirs)]
            shapes = [[(value.shape, value.dtype) for value in each.values()] for each in values]
            assert shapes[0] == shapes[1]


@pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
def test_it_is_what_apply_all_uses(host_npu, dtype):
    model = Softcapped().to("npu", dtype)
    tokens = torch.randint(VOCABULARY, (2, 9), device="npu")
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": "npu_fused_linear_cross_entropy"})

    def train():
        model.zero_grad()
        loss = model(tokens, tokens)[0]
        loss.backward()
        return [loss.detach().float().cpu(), *(each.grad.float().cpu() for each in model.parameters())]

    expected = train()
    with manager.apply_all(model, allow=["lazy_logits"]) as applied:
        (entry,) = applied.report.fused
        assert (entry.kernel_id, entry.check) == ("npu_fused_linear_cross_entropy", "passed")
        host_npu.calls.clear()
        found = train()
        assert host_npu.calls["aten::scatter_add_"] == 1
    torch.testing.assert_close(found, expected, **({} if dtype is SINGLE else {"rtol": 0.05, "atol": 0.02}))
