"""What is specific to the loss in Triton: which programs run, how tokens are cut, and numbers at their limits."""

import itertools
import math

import pytest
import torch
from support.thorough import covering, few_on
from support.vocabularies import (
    BF16,
    DOUBLE,
    DTYPES,
    HALF,
    REDUCTIONS,
    SINGLE,
    TOKENS,
    both,
    labels_for,
    tensors,
    tolerance,
)

from fuseplug_linear_cross_entropy import reference
from fuseplug_linear_cross_entropy.backends import triton
from fuseplug_linear_cross_entropy.backends.triton import launches, linear_cross_entropy, linear_logprob
from fuseplug_linear_cross_entropy.reference import FLOAT, Step, softcapped

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # in values that are dropped
MEASURE, DIFFERENTIATE, BOTH = "measure", "differentiate", "measure_and_differentiate"


def losses(labels=None, **options):
    return both(triton, "linear_cross_entropy", labels, **options)


def logprobs(labels=None, **options):
    return both(triton, "linear_logprob", labels, **options)


@pytest.fixture(autouse=True)
def launched(backend, monkeypatch):
    """The name of each program that is started, with its number of tokens."""
    started = []

    class Recording:
        def __init__(self, name):
            self.name, self.program = name, getattr(launches.programs, name)

        def __getitem__(self, grid):
            started.append((self.name, *grid))
            return self.program[grid]

    for name in (MEASURE, DIFFERENTIATE, BOTH):  # these have one program for each token
        monkeypatch.setattr(launches.programs, name, Recording(name))
    return started


@pytest.fixture(autouse=True)
def keep(monkeypatch):
    """Sets whether the logits are kept for the backward; until it is called, they are not."""

    def keep(kept):
        monkeypatch.setattr(launches, "KEPT", math.inf if kept else 0.0)

    keep(False)
    return keep


@pytest.fixture
def check(backend):
    def check(functions, arguments):
        backend.assert_right(*functions, arguments, tolerance(next(iter(arguments.values())).dtype))

    return check


def kinds(launched):
    return sorted({name for name, _ in launched})


@pytest.mark.parametrize(("share", "sizes"), [(7, [7]), (3.5, [3, 3, 1]), (2.8, [2, 2, 2, 1]), (0, [1] * 7)])
def test_the_tokens_are_cut_as_the_budget_says(check, launched, monkeypatch, share, sizes):
    monkeypatch.setattr(launches, "BUDGET", int(share * 64 * 4))
    check(losses(), tensors())
    assert launched == [(BOTH, size) for size in sizes]


def test_large_chunks_have_the_rows_of_whole_tiles():
    assert launches.rows_of_chunk(8192, 151936 * 2, launches.BUDGET) == 4352
    assert launches.rows_of_chunk(4400, 151936 * 2, launches.BUDGET) == 4400
    assert launches.rows_of_chunk(1700, 151936 * 2, 100 * 151936 * 2) == 100


@pytest.mark.parametrize(("tokens", "rows"), [(9, 9), (10, 4)])
@pytest.mark.parametrize("wanted", ["weight", "hidden"])
def test_a_single_chunk_may_have_the_memory_of_the_sum(backend, launched, monkeypatch, tokens, rows, wanted):
    monkeypatch.setattr(launches, "BUDGET", 4 * 64 * 2)
    # The sum has as many bytes as the logits of five tokens.
    arguments = {"hidden": torch.randn(tokens, 8, dtype=BF16), "weight": torch.randn(20, 8, dtype=BF16)}
    losses(labels_for(tokens, 20))[0](**backend.on(arguments, wanted))
    assert launched[0] == (BOTH, rows if wanted == "weight" else 4)


@pytest.mark.parametrize(
    ("dtype", "reduction", "programs"),
    [(SINGLE, "mean", [BOTH]), (SINGLE, "none", [DIFFERENTIATE, MEASURE]), (HALF, "mean", [DIFFERENTIATE, MEASURE])],
)
def test_a_loss_is_computed_once_if_the_upstream_gradient_is_known(launched, device, dtype, reduction, programs):
    leaves = [t.to(device).requires_grad_() for t in tensors(dtype).values()]
    loss = losses(reduction=reduction)[0](*leaves)
    before = len(launched)
    torch.autograd.grad(loss.sum(), leaves)
    assert kinds(launched) == programs
    assert (len(launched) == before) == (programs == [BOTH])


@pytest.fixture
def device(backend):
    return backend.device


@pytest.mark.parametrize(
    ("steps", "reduction", "smoothing", "bias", "dtype"),
    covering(itertools.product([(FLOAT,), (), softcapped(3.0)], ["mean", "sum"], [0.0, 0.2], [False, True], DTYPES)),
    ids=str,
)
def test_kept_logits_are_computed_once(check, keep, launched, steps, reduction, smoothing, bias, dtype):
    keep(True)
    check(losses(steps=steps, reduction=reduction, label_smoothing=smoothing), tensors(dtype, bias))
    assert launched == [(MEASURE, TOKENS), (DIFFERENTIATE, TOKENS)]


def test_the_backward_may_be_run_twice_on_kept_logits(device, keep, launched):
    keep(True)
    leaves = [t.to(device).requires_grad_() for t in tensors(BF16).values()]
    loss = losses()[0](*leaves)
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=again) for again in (True, False))
    assert all(map(torch.equal, first, second))
    assert kinds(launched) == [DIFFERENTIATE, MEASURE]


@pytest.mark.parametrize(
    ("tokens", "wanted", "kept"),
    [(2048, "both", True), (2617, "both", False), (2048, "weight", True), (1, "hidden", False)],
)
def test_logits_are_kept_if_they_and_their_gradient_fit_the_budget(tokens, wanted, kept, monkeypatch):
    monkeypatch.undo()
    hidden, weight = (torch.empty(n, 4096, dtype=BF16, device="meta") for n in (tokens, 128256))
    hidden.requires_grad_(wanted != "weight")
    weight.requires_grad_(wanted != "hidden")
    assert launches.keeps(hidden, weight) == kept


@pytest.mark.parametrize(("reduction", "kept"), [("none", False), ("mean", True)])
def test_without_a_reduction_no_logits_are_kept(backend, keep, reduction, kept):
    keep(True)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        losses(reduction=reduction)[0](**backend.on(tensors(), "hidden", "weight"))
    assert ((TOKENS, 64) in shapes) == kept


@pytest.mark.parametrize("words", few_on("triton", [1000, 1, 64, 129]))
def test_several_tiles_of_words(check, monkeypatch, words):
    monkeypatch.setattr(launches, "_TILE", 512)
    launches._constants.cache_clear()
    labels = labels_for(words=words)
    check(losses(labels, label_smoothing=0.1), tensors(BF16, True, words=words))
    check(logprobs(labels, entropy=True), tensors(words=words))
    names = ("entropy", "logsumexp", "mean_logits", "log_sum_sq_probs")
    check(losses(labels, statistics=names), tensors(words=words))
    launches._constants.cache_clear()


def test_more_words_than_16_bits_count(check):
    words = (1 << 16) + 3
    labels = torch.tensor([words - 1, 1 << 16, -100])
    check(losses(labels), tensors(BF16, tokens=3, words=words))


def test_results_repeat_to_the_bit(device, monkeypatch):
    monkeypatch.setattr(launches, "rows_of_chunk", lambda *_: 2)
    results = []
    for _ in range(2):
        leaves = [t.to(device).requires_grad_() for t in tensors(BF16).values()]
        loss = losses()[0](*leaves)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", [("hidden",), ("weight", "bias")], ids=str)
def test_only_the_gradients_that_are_wanted_are_made(backend, monkeypatch, wanted, reduction):
    filled = []
    gradients = launches.Gradients
    monkeypatch.setattr(launches, "Gradients", lambda sums, *rest: filled.append(sums) or gradients(sums, *rest))
    losses(reduction=reduction)[0](**backend.on(tensors(bias=True), *wanted)).sum().backward()
    assert [len(sums) for sums in filled] == [len(wanted)]


@pytest.mark.parametrize(("wide", "dtype"), [(BF16, BF16), (SINGLE, BF16), (SINGLE, SINGLE)], ids=str)
@pytest.mark.parametrize("shape", [(3, 1600), (5001,), (1,)])
def test_a_gradient_is_scaled_in_float32_and_rounded_once(device, wide, dtype, shape):
    gradient, third = torch.randn(shape, dtype=wide, device=device), torch.tensor(1 / 3, device=device)
    assert torch.equal(launches.scale(gradient, third, dtype), (gradient.float() * third).to(dtype))
    of_half = third.to(BF16)  # the factor is in half precision if the loss is
    assert torch.equal(launches.scale(gradient, of_half, dtype), (gradient.float() * of_half.float()).to(dtype))


@pytest.mark.parametrize(("rows", "kept"), [(7, BF16), (3, SINGLE)])
def test_a_sum_of_several_chunks_is_kept_in_float32(device, monkeypatch, rows, kept):
    monkeypatch.setattr(launches, "rows_of_chunk", lambda *_: rows)
    leaves = [t.to(device).requires_grad_() for t in tensors(BF16, bias=True).values()]
    loss = losses()[0](*leaves)
    of_hidden, of_weight, of_bias = loss.grad_fn.saved_tensors[:3]
    assert (of_hidden.dtype, of_weight.dtype, of_bias.dtype) == (BF16, kept, SINGLE)
    assert [t.dtype for t in torch.autograd.grad(loss, leaves)] == [BF16] * 3


def test_large_logits_do_not_overflow(check):
    arguments = tensors(bias=True)
    arguments["bias"][5], arguments["bias"][6] = 3e4, -3e4
    check(logprobs(entropy=True), arguments)


@pytest.mark.parametrize(
    ("words", "value"), [(slice(None), math.nan), (slice(None), math.inf), (slice(None), -math.inf), (5, math.inf)]
)
def test_what_is_not_finite_is_nan_as_in_the_reference(device, words, value):
    arguments = {name: t.to(device) for name, t in tensors(bias=True).items()}
    arguments["bias"][words] = value
    ours, theirs = (function(**arguments) for function in logprobs(entropy=True))
    torch.testing.assert_close([t.isnan() for t in ours], [t.isnan() for t in theirs])
    assert ours[0].isnan().any()


def test_a_cap_is_exact_near_zero_and_far_away(device):
    logits = torch.tensor([0.0, 1e-4, -1e-3, 0.29, 0.31, -1.0, 5.0, 60.0, -200.0], device=device)
    hidden, weight = logits[:, None].contiguous(), torch.ones(2, 1, device=device)
    weight[1] = 0
    labels = torch.zeros(len(logits), dtype=torch.int64, device=device)
    exact = reference.linear_logprob(hidden.double(), weight.double(), labels, steps=softcapped(1.0)).logprob
    logprob = linear_logprob(hidden, weight, labels, steps=softcapped(1.0)).logprob
    torch.testing.assert_close(logprob.double(), exact, rtol=4e-7, atol=0)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (tensors(DOUBLE), (FLOAT,)),
        (tensors(words=0, tokens=0), (FLOAT,)),
        (tensors(), (*softcapped(3.0), *softcapped(3.0))),
        (tensors(), (Step("mul", 1e35), Step("div", 1e35), FLOAT, Step("mul", 1e-38))),
    ],
    ids=["float64", "no word", "two caps", "beyond float32"],
)
def test_what_the_programs_do_not_take_is_the_reference(device, launched, arguments, steps):
    labels = labels_for() if len(arguments["hidden"]) else torch.zeros(0, dtype=torch.int64)
    arguments = {name: t.to(device) for name, t in arguments.items()}
    for reduction in REDUCTIONS:
        ours, theirs = (f(**arguments) for f in losses(labels, reduction=reduction, steps=steps))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert launched == []


def test_steps_that_undo_each_other_are_taken(check, launched):
    check(losses(steps=(Step("mul", 1e35), Step("div", 1e35), FLOAT)), tensors())
    assert kinds(launched) == [BOTH]


def test_subclasses_keep_their_own(device, launched):
    class Own(torch.Tensor):
        pass

    assert type(losses()[0](**{name: t.to(device).as_subclass(Own) for name, t in tensors().items()})) is Own
    assert launched == []


def test_the_operations_pass_the_checks_of_torch(device):
    checks = ("test_schema", "test_faketensor")
    hidden, weight, bias = (t.to(device) for t in tensors(bias=True).values())
    labels, terms = labels_for().to(device), (-100, 1.0, 0.1, 1.0, 1.0, False)
    of_token = torch.rand(TOKENS, device=device)
    calls = {
        launches.measure: (hidden, weight, labels, bias, *terms, [True] * 6, True),
        launches.measure_and_differentiate: (hidden, weight, labels, bias, of_token, *terms, [True, True, True]),
        launches.differentiate: (hidden, weight, labels, None, *[of_token] * 7, None, *terms, [False, True, False]),
        launches.scale: (weight, torch.tensor(2.0, device=device), BF16),
    }
    for operation, arguments in calls.items():
        torch.library.opcheck(operation.op, arguments, test_utils=checks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to wait for")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_waits_for_the_device(device, reduction):
    leaves = [t.to(device).requires_grad_() for t in tensors(BF16).values()]
    labels = labels_for().to(device)
    upstream = torch.ones((TOKENS,) if reduction == "none" else (), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(*leaves, labels, reduction=reduction)
        torch.autograd.grad(loss, leaves, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
