"""The loss on each backend: right in every form, for any number of chunks, and the reference where it is not served."""

import functools
import itertools
import math

import pytest
import torch
from support import backends
from support.judging import outcome
from support.thorough import covering, few_on
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
from torch.utils.checkpoint import checkpoint

from fuseplug_linear_cross_entropy import reference
from fuseplug_linear_cross_entropy.backends import chunks as shared_chunks
from fuseplug_linear_cross_entropy.reference import FLOAT, Step, softcapped

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by Triton's interpreter
CHUNKS = {"one chunk": 7, "chunks of three": 3, "a token each": 1}
FORMS = [*REDUCTIONS, "log-probabilities", "statistics"]
DIFFERENTIABLE = tuple(name for name in reference.STATISTICS if name != "is_top1")


@pytest.fixture
def kernel(backend):
    return backend.module("linear_cross_entropy")


@pytest.fixture
def cut(backend, kernel, monkeypatch):
    """Sets how many tokens a chunk has."""

    def into(tokens, itemsize=4):
        monkeypatch.setattr(shared_chunks, "_WORDS", 24)
        if backend.name == "npu":
            monkeypatch.setattr(kernel, "rows_of_chunk", lambda *_: tokens)
            monkeypatch.setattr(kernel, "WORKING", min(tokens, 2) * WORDS * 4)
        elif backend.name == "triton":
            monkeypatch.setattr(kernel.launches, "rows_of_chunk", lambda *_: tokens)
            monkeypatch.setattr(kernel.launches, "KEPT", 0.0)
        else:
            for name in ("_BYTES", "_BYTES_FOR_WEIGHT"):
                monkeypatch.setattr(kernel.chunks, name, tokens * WORDS * itemsize)

    return into


@pytest.fixture
def check(backend, kernel):
    """Compares with the reference: ``check(arguments, labels, name=…, view=…, **options)``."""

    def check(arguments, labels=None, *, view=lambda **arguments: arguments, name="linear_cross_entropy", **options):
        functions = [lambda f=f, **given: f(**view(**given)) for f in both(kernel, name, labels, **options)]
        backend.assert_right(*functions, arguments, tolerance(next(iter(arguments.values())).dtype))

    return check


@pytest.fixture
def functions(kernel):
    """The functions of the kernel and the reference: losses, statistics, or log-probabilities with entropies."""

    def functions(form, labels=None, **options):
        if form == "log-probabilities":
            return both(kernel, "linear_logprob", labels, entropy=True, **options)
        return both(kernel, "linear_cross_entropy", labels, **options_of(form), **options)

    return functions


def options_of(form):
    return {"statistics": DIFFERENTIABLE} if form == "statistics" else {"reduction": form}


def total(results):
    return sum(result.sum() for result in (results if isinstance(results, tuple) else (results,)))


@pytest.mark.parametrize(
    ("steps", "smoothed", "bias", "dtype", "chunks"),
    covering(itertools.product(STEPS, SMOOTHED, (False, True), DTYPES, CHUNKS)),
    ids=str,
)
def test_losses(backend, check, cut, steps, smoothed, bias, dtype, chunks):
    cut(CHUNKS[chunks], dtype.itemsize)
    reduction, smoothing = smoothed
    check(tensors(dtype, bias), steps=STEPS[steps], reduction=reduction, label_smoothing=smoothing)
    assert backend.launches or backend.name == "npu" or dtype is HALF  # Inductor leaves float16 to the reference


@pytest.mark.parametrize(
    ("steps", "entropy", "bias", "dtype", "chunks"),
    covering(itertools.product(STEPS, (False, True), (False, True), DTYPES, CHUNKS)),
    ids=str,
)
def test_log_probabilities(check, cut, steps, entropy, bias, dtype, chunks):
    cut(CHUNKS[chunks], dtype.itemsize)
    check(tensors(dtype, bias), name="linear_logprob", steps=STEPS[steps], entropy=entropy)


@pytest.mark.parametrize(
    ("steps", "reduction", "bias", "dtype", "chunks"),
    covering(itertools.product(STEPS, REDUCTIONS, (False, True), DTYPES, CHUNKS)),
    ids=str,
)
def test_statistics(check, cut, steps, reduction, bias, dtype, chunks):
    cut(CHUNKS[chunks], dtype.itemsize)
    check(tensors(dtype, bias), steps=STEPS[steps], reduction=reduction, statistics=DIFFERENTIABLE)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_statistic_by_itself_is_the_kernels_own(check, backend, name):
    check(tensors(), statistics=(name,))
    assert backend.launches or backend.name == "npu"


@pytest.mark.parametrize("steps", [(FLOAT,), softcapped(3.0)], ids=str)
def test_the_first_of_the_largest_logits_is_top1(backend, kernel, steps):
    labels, weight = torch.tensor([7, 4999, 4999, 3, 0, -100]), torch.zeros(5000, 6)
    weight[[7, 4999], :2] = 2.0
    weight[4999, 2] = weight[7, 3] = 2.0
    arguments = backend.on({"hidden": torch.eye(6), "weight": weight, "labels": labels})
    for function in (kernel.linear_cross_entropy, reference.linear_cross_entropy):
        is_top1 = function(**arguments, steps=steps, statistics=("is_top1",)).is_top1
        assert is_top1.dtype is torch.bool
        assert is_top1.tolist() == [True, False, True, False, True, False]


@pytest.mark.parametrize("words", few_on("triton", [1, 65, 2, 63, 64, 129, 1000], 2))
def test_every_size_of_vocabulary(check, words):
    labels = labels_for(words=words)
    check(tensors(BF16, True, words=words), labels, label_smoothing=0.1)
    check(tensors(words=words), labels, name="linear_logprob", entropy=True)
    check(tensors(words=words), labels, statistics=DIFFERENTIABLE)


@pytest.mark.parametrize("ignore_index", [0, 3])
def test_any_label_may_be_the_one_that_is_ignored(check, ignore_index):
    labels = labels_for()
    labels[labels == -100] = ignore_index
    check(tensors(), labels, ignore_index=ignore_index, label_smoothing=0.1)
    check(tensors(), labels, name="linear_logprob", ignore_index=ignore_index, entropy=True)


VIEWS = {
    "hidden is transposed": ("hidden", (HIDDEN, TOKENS), lambda t: t.t()),
    "hidden is a part of wider rows": ("hidden", (TOKENS, HIDDEN + 3), lambda t: t[:, :HIDDEN]),
    "hidden is every other column": ("hidden", (TOKENS, 2 * HIDDEN), lambda t: t[:, ::2]),
    "hidden is one row again and again": ("hidden", (1, HIDDEN), lambda t: t.expand(TOKENS, -1)),
    "weight is transposed": ("weight", (HIDDEN, WORDS), lambda t: t.t()),
    "weight is every other column": ("weight", (WORDS, 2 * HIDDEN), lambda t: t[:, ::2]),
    "bias is every other number": ("bias", (2 * WORDS,), lambda t: t[::2]),
}


@pytest.mark.parametrize(("reduction", "view"), covering(itertools.product(["mean", "none"], VIEWS)))
def test_arguments_need_not_be_contiguous(check, cut, reduction, view):
    cut(3)
    name, shape, see = VIEWS[view]
    arguments = tensors(bias=True) | {name: torch.randn(shape)}
    check(arguments, view=lambda **given: given | {name: see(given[name])}, reduction=reduction)


def test_labels_need_not_be_contiguous(check):
    labels = labels_for(2 * TOKENS)[::2]
    assert not labels.is_contiguous()
    check(tensors(), labels)


@pytest.mark.parametrize("form", ["mean", "none"])
def test_there_may_be_more_dimensions(functions, backend, form):
    arguments = backend.on(tensors(tokens=6))
    labels = labels_for(6).view(2, 3)
    ours, theirs = (f(arguments["hidden"].view(2, 3, HIDDEN), arguments["weight"]) for f in functions(form, labels))
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_hidden_may_be_made_of_the_weight(check, reduction):
    def tied(weight):
        return {"hidden": weight[:TOKENS].sin(), "weight": weight}

    check({"weight": tensors()["weight"]}, view=tied, reduction=reduction)


NEEDS = [names for n in (1, 2) for names in itertools.combinations(("hidden", "weight", "bias"), n)]


@pytest.mark.parametrize(("form", "wanted"), covering(itertools.product(["mean", "none"], NEEDS)), ids=str)
def test_only_the_gradients_that_are_wanted(backend, functions, form, wanted):
    arguments = backend.on(tensors(bias=True), *wanted)
    leaves = [arguments[name] for name in wanted]
    ours, theirs = (torch.autograd.grad(total(f(**arguments)), leaves) for f in functions(form))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("form", ["mean", "none"])
def test_no_gradient_is_made_where_none_is_wanted(backend, functions, context, form):
    arguments = backend.on(tensors(), "hidden", "weight")
    ours, theirs = functions(form)
    with context():
        loss = ours(**arguments)
        torch.testing.assert_close(loss, theirs(**arguments))
    assert loss.grad_fn is None
    assert ours(**{name: t.detach() for name, t in arguments.items()}).grad_fn is None


@pytest.mark.parametrize(("dtype", "form"), covering(itertools.product(DTYPES, REDUCTIONS)), ids=str)
def test_the_backward_may_be_run_twice(backend, functions, dtype, form):
    leaves = list(backend.on(tensors(dtype), "hidden", "weight").values())
    loss = functions(form)[0](*leaves)
    first = torch.autograd.grad(loss.sum(), leaves, retain_graph=True)
    before = [t.clone() for t in first]
    for t in first:
        t.zero_()  # the gradients that were returned belong to the caller
    torch.testing.assert_close(torch.autograd.grad(loss.sum() * 2, leaves), tuple(2 * t for t in before))


@pytest.mark.parametrize("form", ["none", "log-probabilities", "statistics"])
def test_results_may_be_written_into(backend, functions, form):
    leaves = list(backend.on(tensors(), "hidden", "weight").values())

    def halved(function):
        results = function(*leaves)
        for result in results if isinstance(results, tuple) else (results,):
            result.mul_(0.5)
        return torch.autograd.grad(total(results), leaves)

    torch.testing.assert_close(*map(halved, functions(form)), rtol=1e-4, atol=1e-5)


def test_gradients_add_up_in_the_weight_of_two_losses(backend, functions):
    ours, theirs = functions("mean")
    leaves = list(backend.on(tensors(), "hidden", "weight").values())
    for _ in range(2):
        ours(*leaves).backward()
    expected = torch.autograd.grad(2 * theirs(*leaves), leaves)
    torch.testing.assert_close([t.grad for t in leaves], list(expected))


def test_what_is_small_in_float16_is_kept_if_the_loss_is_scaled(backend, kernel):
    hidden, weight = torch.zeros(2, HIDDEN, dtype=HALF), torch.zeros(3, HIDDEN, dtype=HALF)
    hidden[:, 0] = 1
    weight[0, 0] = 18  # so that the others have a probability of 1.5e-8, which is 0 in float16
    labels = torch.zeros(2, dtype=torch.int64, device=backend.device)
    arguments = backend.on({"hidden": hidden, "weight": weight}, "weight")
    loss = kernel.linear_cross_entropy(**arguments, labels=labels) * 2.0**16
    (gradient,) = torch.autograd.grad(loss, arguments["weight"])
    torch.testing.assert_close(gradient[1, 0].item(), 2.0**16 * math.exp(-18), rtol=2e-3, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_it_may_be_differentiated_again(backend, functions, form):
    def twice(function):
        leaves = list(backend.on(tensors(bias=True), "hidden", "weight", "bias").values())
        results = function(*leaves)
        squares = tuple(t.square() for t in (results if isinstance(results, tuple) else (results,)))
        first = torch.autograd.grad(total(squares), leaves, create_graph=True)
        # As shares of the largest, because the sine of a large gradient is as uncertain as its last digits.
        return torch.autograd.grad(sum((t / t.detach().abs().max()).sin().sum() for t in first), leaves)

    for ours, theirs in zip(*map(twice, functions(form)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * max(1.0, theirs.abs().max().item()))


@pytest.mark.skipif(backends.NAME == "npu", reason="torch_npu has no batching rules")
@pytest.mark.parametrize("form", ["mean", "none"])
def test_it_takes_a_batch_of_gradients(backend, functions, form):
    upstream = torch.randn((2,) if form == "mean" else (2, TOKENS)).to(backend.device)
    leaves = list(backend.on(tensors(), "hidden", "weight").values())
    gradients = [torch.autograd.grad(f(*leaves), leaves, upstream, is_grads_batched=True) for f in functions(form)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("of", [0, 1])
def test_one_of_two_results_may_be_left_unused(backend, functions, of):
    leaves = list(backend.on(tensors(), "hidden", "weight").values())
    gradients = [torch.autograd.grad(f(*leaves)[of].sum(), leaves) for f in functions("log-probabilities")]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["mean", "none", "statistics"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(backend, functions, use_reentrant, form):
    ours, theirs = functions(form)
    leaves = list(backend.on(tensors(), "hidden", "weight").values())
    total(checkpoint(ours, *leaves, use_reentrant=use_reentrant)).backward()
    expected = list(torch.autograd.grad(total(theirs(*leaves)), leaves))
    torch.testing.assert_close([t.grad for t in leaves], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("form", REDUCTIONS)
def test_all_labels_ignored(backend, functions, form, smoothing):
    ours, theirs = functions(form, torch.full((TOKENS,), -100), label_smoothing=smoothing)
    results, expected = outcome(ours, tensors(), backend.device).on_cpu(), outcome(theirs, tensors()).values
    torch.testing.assert_close(results, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("form", REDUCTIONS)
def test_an_ignored_token_may_be_anything(backend, functions, form, value):
    arguments = tensors()
    arguments["hidden"][2] = value
    ours, theirs = (f(**backend.on(arguments)) for f in functions(form))
    torch.testing.assert_close(ours, theirs)
    assert ours.isfinite().all()


@pytest.mark.parametrize("label", [-1, WORDS, 1 << 40])
@pytest.mark.parametrize("form", ["mean", "none"])
def test_a_label_outside_of_the_vocabulary_is_an_error_or_nan(backend, functions, form, label):
    labels = labels_for()
    labels[1] = label
    leaves = list(backend.on(tensors(), "hidden", "weight").values())
    ours, _ = functions(form, labels)
    if backend.name == "inductor":
        with pytest.raises(IndexError, match=rf"Target {label} is out of bounds\..*0 to {WORDS - 1}"):
            ours(*leaves)
        return
    loss = ours(*leaves)  # a device does not stop at the bad label
    of_hidden, _ = torch.autograd.grad(loss.sum(), leaves)
    assert of_hidden.cpu().isnan().any(-1).nonzero().flatten().tolist() == [1]
    is_nan = loss.detach().cpu().isnan()
    assert is_nan.nonzero().flatten().tolist() == [1] if form == "none" else is_nan


@pytest.mark.parametrize("entropy", [False, True])
def test_a_word_that_cannot_be_costs_nothing(backend, kernel, entropy):
    arguments, labels = tensors(bias=True), labels_for()
    arguments["bias"][[0, 7, 40]] = -math.inf
    labels[labels == 0] = 3
    ours, theirs = both(kernel, "linear_logprob", labels, entropy=entropy)
    results, expected = outcome(ours, arguments, backend.device).on_cpu(), outcome(theirs, arguments).values
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)
    assert all(value.isfinite().all() for value in results.values())


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (tensors(DOUBLE), {}),
        (tensors(tokens=0), {}),
        (tensors(), {"steps": (*softcapped(3.0), *softcapped(3.0))}),
    ],
    ids=["float64", "no token", "two caps"],
)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_rare_is_right(backend, functions, arguments, options, form):
    tokens = len(arguments["hidden"])
    labels = labels_for(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    ours, theirs = functions(form, labels, **options)
    results, expected = outcome(ours, arguments, backend.device).on_cpu(), outcome(theirs, arguments).values
    torch.testing.assert_close(results, expected, equal_nan=True)


@pytest.mark.parametrize("where", ["forward", "forward and backward"])
@pytest.mark.parametrize("dtype", [SINGLE, BF16], ids=str)
def test_under_autocast_the_dtypes_are_those_of_the_reference(backend, functions, dtype, where):
    results = []
    for function in functions("mean"):
        leaves = list(backend.on(tensors(dtype), "hidden", "weight").values())
        with torch.autocast(backend.device, dtype=BF16):
            loss = function(*leaves)
            gradients = torch.autograd.grad(loss, leaves) if where != "forward" else None
        results.append([loss.detach(), *(gradients or torch.autograd.grad(loss, leaves))])
    assert [t.dtype for t in results[0]] == [t.dtype for t in results[1]] == [SINGLE, dtype, dtype]
    torch.testing.assert_close(*results, rtol=0.03, atol=0.01)


def test_transforms_see_the_reference(backend, functions):
    arguments = backend.on(tensors())
    for transform in (torch.func.grad, *([] if backend.name == "npu" else [_tangent])):
        ours, theirs = (transform(f)(*arguments.values()) for f in functions("mean"))
        torch.testing.assert_close(ours, theirs)


def _tangent(function):
    return lambda hidden, weight: torch.func.jvp(lambda hidden: function(hidden, weight), (hidden,), (hidden,))


@pytest.mark.parametrize("form", ["mean", "none", "statistics"])
def test_inside_torch_compile_it_is_one_graph_for_every_number_of_tokens(backend, kernel, form):
    torch.compiler.reset()
    options = options_of(form) | {"steps": softcapped(3.0)}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(hidden, weight, labels):
        result = kernel.linear_cross_entropy(hidden, weight, labels, **options)
        return result if isinstance(result, torch.Tensor) else result[:-1]  # the last is None, for is_top1

    for tokens in (5, 8, 9) if form == "mean" else (5,):
        labels = labels_for(tokens)
        ours = functools.partial(compiled, labels=labels.to(backend.device))
        _, theirs = both(kernel, "linear_cross_entropy", labels, **options)
        # torch.compile compiles it for one number of tokens, and then for any number.
        with torch.compiler.set_stance("fail_on_recompile" if tokens == 9 else "default"):
            backend.assert_right(ours, theirs, tensors(BF16, tokens=tokens), tolerance(BF16))


@pytest.mark.parametrize("steps", [(FLOAT,), ()])
@pytest.mark.parametrize("form", [*REDUCTIONS, "statistics"])
def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(fake_backend, form, steps):
    kernel = fake_backend.module("linear_cross_entropy")
    functions = both(kernel, "linear_cross_entropy", steps=steps, **options_of(form))
    for dtype in DTYPES:
        ours, theirs = (outcome(f, tensors(dtype, True), fake_backend.device).values for f in functions)
        assert [(t.shape, t.dtype) for t in ours.values()] == [(t.shape, t.dtype) for t in theirs.values()]


LOSS_ONLY = [
    ({"reduction": "max"}, "reduction is 'max'; expected 'mean', 'sum' or 'none'"),
    ({"label_smoothing": 1.5}, "label_smoothing is 1.5; expected a number from 0 to 1"),
    ({"label_smoothing": None}, "label_smoothing=None needs reduction='none'; reduction is 'mean'"),
    ({"statistics": ("variance",)}, "unknown statistic 'variance'; known: entropy, logsumexp, mean_logits"),
    (
        {"statistics": ("entropy",), "label_smoothing": 0.1},
        "statistics need label_smoothing=0.0; label_smoothing is 0.1",
    ),
]
BOTH = [
    ({"steps": (Step("tan", 1.0),)}, "unknown step 'tan'; known: float, mul, div, tanh"),
    ({"steps": (Step("div", 0.0),)}, "step 'div' has the number 0.0; expected a finite one"),
    ({"steps": (Step("mul", torch.inf),)}, "step 'mul' has the number inf; expected a finite one"),
    ({"weight": torch.ones(4)}, r"hidden is \[2, 4\] and weight \[4\]; expected"),
    ({"weight": torch.ones(7, 5)}, r"hidden is \[2, 4\] and weight \[7, 5\]; expected"),
    ({"labels": torch.ones(3, dtype=torch.int64)}, r"labels are \[3\]; expected one for each row of hidden \[2, 4\]"),
    ({"labels": torch.ones(2, dtype=torch.int32)}, r"labels are torch.int32; expected torch.int64: labels.long\(\)"),
    ({"bias": torch.ones(6)}, r"bias is \[6\]; expected \[7\]"),
    ({"weight": torch.ones(7, 4).half()}, "weight is torch.float16; expected torch.float32, the dtype of hidden"),
    ({"bias": torch.ones(7).double()}, "bias is torch.float64; expected torch.float32, the dtype of hidden"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [("linear_cross_entropy", *row) for row in LOSS_ONLY]
    + [(name, *row) for name, row in itertools.product(("linear_cross_entropy", "linear_logprob"), BOTH)],
)
def test_what_does_not_fit_is_named(kernel, name, arguments, message):
    usual = {"hidden": torch.ones(2, 4), "weight": torch.ones(7, 4), "labels": torch.ones(2, dtype=torch.int64)}
    for module in (kernel, reference):
        with pytest.raises(ValueError, match=message):
            getattr(module, name)(**{**usual, **arguments})
