"""The loss by Triton: right in every form, for any number of chunks, and really by the kernels."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from support.judging import outcome
from support.thorough import covering, thorough
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
from torch._subclasses import FakeTensorMode

from fuseplug import KernelManager
from fuseplug_linear_cross_entropy import reference
from fuseplug_linear_cross_entropy.backends import triton
from fuseplug_linear_cross_entropy.backends.triton import launches, linear_cross_entropy, linear_logprob
from fuseplug_linear_cross_entropy.reference import FLOAT, Step, softcapped
from fuseplug_linear_cross_entropy.specimens import VOCABULARY, Softcapped

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),  # by the interpreter, in what is dropped
]

ROW = 64
"""Elements of a row of logits in memory, of 50 words."""

BUDGETS = {"one chunk": 1.0, "even chunks": 0.5, "a ragged last chunk": 0.4, "a token each": 0.0}
MEASURE, DIFFERENTIATE, BOTH = "measure", "differentiate", "measure_and_differentiate"


def losses(labels=None, **options):
    return both(triton, "linear_cross_entropy", labels, **options)


def logprobs(labels=None, **options):
    return both(triton, "linear_logprob", labels, **options)


@pytest.fixture
def assert_right(device):
    def check(both, given):
        ours, theirs = both
        allowed = tolerance(next(iter(given.values())).dtype)
        found = outcome(ours, given, device)
        missing = [name for name, value in found.values.items() if value is None]
        assert not missing, f"no {', '.join(missing)}"
        why = allowed.excess(found, outcome(theirs, given), outcome(theirs, given, dtype=DOUBLE))
        assert not why, why

    return check


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The programs that are started, by name, and how many tokens each has."""
    started = []

    class Recording:
        def __init__(self, name):
            self.name, self.program = name, getattr(launches.programs, name)

        def __getitem__(self, grid):
            started.append((self.name, *grid))
            return self.program[grid]

    for name in (MEASURE, DIFFERENTIATE, BOTH):
        monkeypatch.setattr(launches.programs, name, Recording(name))
    return started


@pytest.fixture
def budget(monkeypatch):
    def part_of(share, tokens=TOKENS, itemsize=4):
        monkeypatch.setattr(launches, "BUDGET", int(share * tokens * ROW * itemsize))

    return part_of


def kinds(launched):
    return sorted({name for name, _ in launched})


class TestValuesAndGradients:
    @pytest.mark.parametrize(
        ("steps", "smoothed", "bias", "dtype", "share"),
        covering(itertools.product(STEPS, SMOOTHED, (False, True), DTYPES, BUDGETS)),
        ids=str,
    )
    def test_of_the_loss(self, assert_right, launched, budget, steps, smoothed, bias, dtype, share):
        reduction, smoothing = smoothed
        budget(BUDGETS[share], itemsize=dtype.itemsize)
        how = {"steps": STEPS[steps], "reduction": reduction, "label_smoothing": smoothing}
        assert_right(losses(**how), tensors(dtype, bias))
        known = reduction != "none" and dtype is not HALF
        assert kinds(launched) == ([BOTH] if known else [DIFFERENTIATE, MEASURE])

    @pytest.mark.parametrize(
        ("steps", "entropy", "bias", "dtype", "share"),
        covering(itertools.product(STEPS, (False, True), (False, True), DTYPES, BUDGETS)),
        ids=str,
    )
    def test_of_log_probabilities(self, assert_right, launched, budget, steps, entropy, bias, dtype, share):
        budget(BUDGETS[share], itemsize=dtype.itemsize)
        assert_right(logprobs(steps=STEPS[steps], entropy=entropy), tensors(dtype, bias))
        assert kinds(launched) == [DIFFERENTIATE, MEASURE]

    @pytest.mark.parametrize(
        ("share", "sizes"),
        [
            ("one chunk", [7]),
            ("even chunks", [3, 3, 1]),
            ("a ragged last chunk", [2, 2, 2, 1]),
            ("a token each", [1] * 7),
        ],
    )
    def test_the_tokens_are_cut_as_the_budget_says(self, assert_right, launched, budget, share, sizes):
        budget(BUDGETS[share])
        assert_right(losses(), tensors())
        assert launched == [(BOTH, size) for size in sizes]

    def test_large_chunks_have_the_rows_of_whole_tiles(self):
        assert launches.rows_of_chunk(8192, 151936 * 2, launches.BUDGET) == 3328
        assert launches.rows_of_chunk(3500, 151936 * 2, launches.BUDGET) == 3500
        assert launches.rows_of_chunk(1700, 151936 * 2, 100 * 151936 * 2) == 100

    @pytest.mark.parametrize("words", [1, 2, 63, 64, 65, 129, 1000])
    @pytest.mark.parametrize("dtype", [BF16, SINGLE], ids=str)
    def test_of_every_size_of_vocabulary(self, assert_right, monkeypatch, dtype, words):
        monkeypatch.setattr(launches, "_TILE", 512)  # so that there are several
        launches._constants.cache_clear()
        labels = labels_for(words=words)
        assert_right(losses(labels, label_smoothing=0.1), tensors(dtype, True, words=words))
        assert_right(logprobs(labels, entropy=True), tensors(dtype, words=words))
        launches._constants.cache_clear()

    def test_of_more_words_than_16_bits_count(self, assert_right):
        words = (1 << 16) + 3
        labels = torch.tensor([words - 1, 1 << 16, 5, -100])
        assert_right(losses(labels), tensors(BF16, tokens=4, words=words))
        assert_right(logprobs(labels, entropy=True), tensors(tokens=4, words=words))

    @pytest.mark.parametrize("ignore_index", [-100, 0, 3, 1])
    def test_any_label_may_be_the_one_that_is_ignored(self, assert_right, ignore_index):
        labels = labels_for()
        labels[labels == -100] = ignore_index
        assert_right(losses(labels, ignore_index=ignore_index, label_smoothing=0.1), tensors())
        assert_right(logprobs(labels, ignore_index=ignore_index, entropy=True), tensors())

    def test_results_repeat_to_the_bit(self, device, budget):
        budget(0.4, itemsize=2)
        once, again = (outcome(losses()[0], tensors(BF16), device).values for _ in range(2))
        assert all(torch.equal(value, again[name]) for name, value in once.items())


VIEWS = {
    "hidden is transposed": ("hidden", lambda t: t.t()),
    "hidden is a part of wider rows": ("hidden", lambda t: t[:, :HIDDEN]),
    "hidden is every other column": ("hidden", lambda t: t[:, ::2]),
    "weight is transposed": ("weight", lambda t: t.t()),
    "weight is every other column": ("weight", lambda t: t[:, ::2]),
    "bias is every other number": ("bias", lambda t: t[::2]),
}
SHAPES = {
    "hidden is transposed": (HIDDEN, TOKENS),
    "hidden is a part of wider rows": (TOKENS, HIDDEN + 3),
    "hidden is every other column": (TOKENS, 2 * HIDDEN),
    "weight is transposed": (HIDDEN, WORDS),
    "weight is every other column": (WORDS, 2 * HIDDEN),
    "bias is every other number": (2 * WORDS,),
}


class TestArguments:
    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_need_not_be_contiguous(self, assert_right, launched, budget, reduction, view):
        budget(0.4)
        name, seen = VIEWS[view]
        given = tensors(bias=True) | {name: torch.randn(SHAPES[view])}

        def viewed(function):
            return lambda **given: function(**given | {name: seen(given[name])})

        assert_right([viewed(function) for function in losses(reduction=reduction)], given)
        assert launched

    def test_labels_need_not_be_contiguous(self, assert_right):
        labels = labels_for(2 * TOKENS)[::2]
        assert not labels.is_contiguous()
        assert_right(losses(labels), tensors())

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_may_have_more_dimensions(self, device, reduction):
        given = {name: t.to(device) for name, t in tensors(tokens=6).items()}
        labels = labels_for(6).to(device).view(2, 3)
        found = [
            function(given["hidden"].view(2, 3, HIDDEN), given["weight"], labels, reduction=reduction)
            for function in (linear_cross_entropy, reference.linear_cross_entropy)
        ]
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_hidden_may_be_made_of_the_weight(self, assert_right, reduction):
        def tied(function):
            return lambda weight: function(weight[:TOKENS].sin(), weight)

        assert_right([tied(function) for function in losses(reduction=reduction)], {"weight": tensors()["weight"]})

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("needs", [n for n in itertools.product((False, True), repeat=3) if any(n)], ids=str)
    def test_only_the_gradients_that_are_wanted_are_made(self, device, monkeypatch, needs, reduction):
        made = []
        filling = launches._filling
        monkeypatch.setattr(
            launches, "_filling", lambda results, *rest: made.append(results) or filling(results, *rest)
        )
        found, expected = [], []
        for function, into in zip(losses(reduction=reduction), (found, expected), strict=True):
            given = [
                t.to(device).requires_grad_(need) for t, need in zip(tensors(bias=True).values(), needs, strict=True)
            ]
            wanted = [t for t in given if t.requires_grad]
            into += torch.autograd.grad(function(*given).sum(), wanted)
        torch.testing.assert_close(found, expected)
        assert [len(results) for results in made] == [sum(needs)]

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_no_gradient_is_made_where_none_is_wanted(self, device, launched, context, reduction):
        given = [t.to(device).requires_grad_() for t in tensors().values()]
        with context():
            assert losses(reduction=reduction)[0](*given).grad_fn is None
        assert losses(reduction=reduction)[0](*(t.detach() for t in given)).grad_fn is None
        assert kinds(launched) == [MEASURE]


class TestTheBackward:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_may_be_run_twice(self, device, dtype, reduction):
        given = [t.to(device).requires_grad_() for t in tensors(dtype).values()]
        loss = losses(reduction=reduction)[0](*given)
        first = torch.autograd.grad(loss.sum(), given, retain_graph=True)
        before = [t.clone() for t in first]
        for t in first:
            t.zero_()  # what was given is the caller's
        torch.testing.assert_close(torch.autograd.grad(loss.sum() * 2, given), tuple(2 * t for t in before))

    def test_of_a_known_reduction_computes_nothing_but_products(self, device, launched):
        given = [t.to(device).requires_grad_() for t in tensors().values()]
        loss = losses()[0](*given)
        launched.clear()
        torch.autograd.grad(loss, given)
        assert launched == []

    def test_scales_in_float32_and_rounds_once(self, device):
        gradient = torch.tensor([3.0, 5.0], dtype=BF16, device=device)
        third = torch.tensor(1 / 3, device=device)
        expected = (gradient.float() * third).to(BF16)
        assert not torch.equal(gradient * third.to(BF16), expected)
        assert torch.equal(launches.scale(gradient, third), expected)

    def test_keeps_what_is_small_in_float16_if_the_loss_is_scaled(self, device):
        hidden = torch.zeros(2, HIDDEN, dtype=HALF, device=device)
        hidden[:, 0] = 1
        weight = torch.zeros(3, HIDDEN, dtype=HALF, device=device)
        weight[0, 0] = 18  # so that the others have a probability of 1.5e-8, which is 0 in float16
        weight.requires_grad_()
        labels = torch.zeros(2, dtype=torch.int64, device=device)
        (found,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels) * 2.0**16, weight)
        torch.testing.assert_close(found[1, 0].item(), 2.0**16 * math.exp(-18), rtol=2e-3, atol=0)

    @pytest.mark.parametrize("how", [*REDUCTIONS, "log-probabilities"])
    def test_may_be_differentiated_again(self, device, how):
        found = []
        for function in logprobs(entropy=True) if how == "log-probabilities" else losses(reduction=how):
            given = [t.to(device).requires_grad_() for t in tensors(bias=True).values()]
            results = function(*given)
            total = sum(each.square().sum() for each in (results if isinstance(results, tuple) else (results,)))
            first = torch.autograd.grad(total, given, create_graph=True)
            found.append(torch.autograd.grad(sum(t.sin().sum() for t in first), given))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_takes_a_batch_of_gradients(self, device, reduction):
        upstream = torch.randn((2,) if reduction == "mean" else (2, TOKENS), device=device)
        found = []
        for function in losses(reduction=reduction):
            given = [t.to(device).requires_grad_() for t in tensors().values()]
            found.append(torch.autograd.grad(function(*given), given, upstream, is_grads_batched=True))
        torch.testing.assert_close(*found)

    @pytest.mark.parametrize("of", ["logprob", "entropy"])
    def test_one_of_two_results_may_be_left_unused(self, device, of):
        found = []
        for function in (linear_logprob, reference.linear_logprob):
            given = [t.to(device).requires_grad_() for t in tensors().values()]
            result = function(*given[:2], labels_for().to(device), entropy=True)
            found.append(torch.autograd.grad(getattr(result, of).sum(), given))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class TestWhatIsExtreme:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_all_labels_ignored(self, device, reduction, smoothing):
        labels = torch.full((TOKENS,), -100)
        found, expected = (
            outcome(function, tensors(), device).values
            for function in losses(labels, reduction=reduction, label_smoothing=smoothing)
        )
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)

    @pytest.mark.parametrize("what", [math.nan, math.inf])
    def test_an_ignored_token_may_be_anything(self, device, what):
        for reduction in REDUCTIONS:
            given = {name: t.to(device) for name, t in tensors().items()}
            given["hidden"][2] = what
            ours, theirs = (function(**given) for function in losses(reduction=reduction))
            torch.testing.assert_close(ours, theirs)
            assert ours.isfinite().all()

    @pytest.mark.parametrize("label", [-1, WORDS, 1 << 40])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_a_label_outside_of_the_vocabulary_makes_its_token_nan(self, device, reduction, label):
        labels = labels_for()
        labels[1] = label
        given = [t.to(device).requires_grad_() for t in tensors().values()]
        loss = losses(labels, reduction=reduction)[0](*given)
        of_hidden, _ = torch.autograd.grad(loss.sum(), given)
        assert of_hidden.isnan().any(-1).nonzero().flatten().tolist() == [1]
        if reduction == "none":
            assert loss.isnan().nonzero().flatten().tolist() == [1]
        else:
            assert loss.isnan()

    @pytest.mark.parametrize("entropy", [False, True])
    def test_a_word_that_cannot_be_costs_nothing(self, device, entropy):
        given = tensors(bias=True)
        given["bias"][[0, 7, 40]] = -math.inf
        labels = labels_for()
        labels[labels == 0] = 3
        found, expected = (outcome(f, given, device).values for f in logprobs(labels, entropy=entropy))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert all(value.isfinite().all() for value in found.values())

    def test_large_logits_do_not_overflow(self, assert_right):
        given = tensors(bias=True)
        given["bias"][5] = 3e4
        given["bias"][6] = -3e4
        assert_right(logprobs(entropy=True), given)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_nan_as_in_the_reference(self, device, value):
        given = {name: t.to(device) for name, t in tensors(bias=True).items()}
        given["bias"][:] = value
        ours, theirs = (function(**given) for function in logprobs(entropy=True))
        torch.testing.assert_close([each.isnan() for each in ours], [each.isnan() for each in theirs])
        assert ours[0].isnan().any()

    def test_a_cap_is_exact_near_zero_and_far_away(self, device):
        logits = torch.tensor([0.0, 1e-4, -1e-3, 0.29, 0.31, -1.0, 5.0, 60.0, -200.0], device=device)
        hidden, weight = logits[:, None].contiguous(), torch.ones(2, 1, device=device)
        weight[1] = 0
        labels = torch.zeros(len(logits), dtype=torch.int64, device=device)
        exact = reference.linear_logprob(hidden.double(), weight.double(), labels, steps=softcapped(1.0)).logprob
        found = linear_logprob(hidden, weight, labels, steps=softcapped(1.0)).logprob
        torch.testing.assert_close(found.double(), exact, rtol=4e-7, atol=0)


class TestWhereTheReferenceRuns:
    @pytest.mark.parametrize(
        ("given", "options"),
        [
            (tensors(DOUBLE), {}),
            (tensors(tokens=0), {}),
            (tensors(words=0, tokens=0), {}),
            (tensors(), {"steps": (*softcapped(3.0), *softcapped(3.0))}),
            (tensors(), {"steps": (Step("mul", 1e35), Step("div", 1e35), FLOAT, Step("mul", 1e-38))}),
        ],
        ids=["float64", "no token", "no word", "two caps", "beyond float32"],
    )
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_what_the_kernels_do_not_take(self, device, launched, given, options, reduction):
        labels = labels_for(len(given["hidden"])) if len(given["hidden"]) else torch.zeros(0, dtype=torch.int64)
        both = losses(labels, reduction=reduction, **options)
        found, expected = (outcome(function, given, device).values for function in both)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
        if reduction == "none":
            both = logprobs(labels, entropy=True, **options)
            found, expected = (outcome(function, given, device).values for function in both)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert launched == []

    def test_steps_that_undo_each_other_are_taken(self, assert_right, launched):
        assert_right(losses(steps=(Step("mul", 1e35), Step("div", 1e35), FLOAT)), tensors())
        assert kinds(launched) == [BOTH]

    def test_errors_are_those_of_the_reference(self, device, launched):
        with pytest.raises(ValueError, match="unknown step"):
            losses(steps=(Step("round"),))[0](**{name: t.to(device) for name, t in tensors().items()})
        assert launched == []

    @pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
    def test_under_autocast_the_dtypes_are_those_of_the_reference(self, device, launched, dtype):
        found = []
        for function in losses():
            given = [t.to(device, dtype).requires_grad_() for t in tensors().values()]
            with torch.autocast(device, dtype=BF16):
                loss = function(*given)
                grads = torch.autograd.grad(loss, given)
            found.append([loss, *grads])
        assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]] == [SINGLE, dtype, dtype]
        torch.testing.assert_close(*found, rtol=0.03, atol=0.01)
        assert kinds(launched) == [BOTH]

    def test_subclasses_keep_their_own(self, device, launched):
        class Own(torch.Tensor):
            pass

        given = {name: t.to(device).as_subclass(Own) for name, t in tensors().items()}
        assert type(losses()[0](**given)) is Own
        assert launched == []

    def test_transforms_see_the_operations_themselves(self, device, launched):
        given = [t.to(device) for t in tensors().values()]
        ours, theirs = losses()
        torch.testing.assert_close(torch.func.grad(ours)(*given), torch.func.grad(theirs)(*given))
        assert launched == []


class TestCompilers:
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_one_graph_with_its_gradient_for_every_number_of_tokens(self, device, assert_right, launched, reduction):
        torch.compiler.reset()
        how = {"reduction": reduction, "steps": softcapped(3.0)}

        @torch.compile(fullgraph=True, backend="aot_eager")
        def compiled(hidden, weight, labels):
            return linear_cross_entropy(hidden, weight, labels, **how)

        for tokens in (5, 8, 9):
            labels = labels_for(tokens)
            ours = functools.partial(compiled, labels=labels.to(device))
            launched.clear()
            assert_right((ours, losses(labels, **how)[1]), tensors(BF16, tokens=tokens))
            assert kinds(launched) == ([BOTH] if reduction == "mean" else [DIFFERENTIATE, MEASURE])

    @pytest.mark.parametrize("steps", [(FLOAT,), ()])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(self, launched, reduction, steps):
        for dtype in DTYPES:
            described = []
            for function in (linear_cross_entropy, reference.linear_cross_entropy):
                with FakeTensorMode() as mode:
                    given = [mode.from_tensor(t).requires_grad_() for t in tensors(dtype, True).values()]
                    hidden, weight, bias = given
                    labels = mode.from_tensor(labels_for())
                    loss = function(hidden, weight, labels, bias, reduction=reduction, steps=steps)
                    found = [loss, *torch.autograd.grad(loss.sum(), given)]
                described.append([(t.shape, t.dtype) for t in found])
            assert described[0] == described[1]
        assert launched == []

    def test_the_operations_pass_the_checks_of_torch(self, device):
        hidden, weight, bias = (t.to(device) for t in tensors(bias=True).values())
        labels, terms = labels_for().to(device), (-100, 1.0, 0.1, 1.0, 1.0, False)
        of_token = torch.rand(TOKENS, device=device)
        torch.library.opcheck(launches.measure.op, (hidden, weight, labels, bias, *terms, True, True))
        both = (hidden, weight, labels, bias, of_token, *terms, [True, True, True])
        torch.library.opcheck(launches.measure_and_differentiate.op, both)
        rest = (of_token, of_token, of_token, of_token, of_token)
        again = (hidden, weight, labels, None, *rest, *terms, [False, True, False])
        torch.library.opcheck(launches.differentiate.op, again)
        torch.library.opcheck(launches.scale.op, (weight, torch.tensor(2.0, device=device)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to wait for")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_waits_for_the_device(device, reduction):
    given = [t.to(device).requires_grad_() for t in tensors(BF16).values()]
    labels = labels_for().to(device)
    upstream = torch.ones((TOKENS,) if reduction == "none" else (), device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(*given, labels, reduction=reduction)
        torch.autograd.grad(loss, given, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@thorough  # half a minute in the interpreter; the benchmark applies it, too
@pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
def test_it_is_what_apply_all_uses(device, launched, dtype):
    model = Softcapped().to(device, dtype)
    tokens = torch.randint(VOCABULARY, (2, 9), device=device)
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": "triton_fused_linear_cross_entropy"})

    def train():
        model.zero_grad()
        loss = model(tokens, tokens)[0]
        loss.backward()
        return [loss.detach().float().cpu(), *(each.grad.float().cpu() for each in model.parameters())]

    expected = train()
    with manager.apply_all(model, allow=["lazy_logits"]) as applied:
        (entry,) = applied.report.fused
        assert (entry.kernel_id, entry.check) == ("triton_fused_linear_cross_entropy", "passed")
        launched.clear()
        found = train()
        assert kinds(launched) == [BOTH]
    torch.testing.assert_close(found, expected, **({} if dtype is SINGLE else {"rtol": 0.05, "atol": 0.02}))
