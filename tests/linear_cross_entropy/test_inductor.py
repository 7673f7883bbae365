"""The loss in blocks of tokens is right, holds no more logits than it declares, and is compiled twice."""

import functools
import itertools
import threading

import pytest
import torch
from support.judging import outcome
from support.thorough import covering, first_quick
from torch import nn

from fuseplug_linear_cross_entropy import FLOAT, Step, functional, reference, scaled, softcapped
from fuseplug_linear_cross_entropy.backends import chunks as shared_chunks
from fuseplug_linear_cross_entropy.backends import inductor
from fuseplug_linear_cross_entropy.backends.inductor import chunks, programs
from fuseplug_linear_cross_entropy.kernels import InductorLinearCrossEntropyKernel
from fuseplug_verify import Tolerance

pytestmark = pytest.mark.skipif(
    InductorLinearCrossEntropyKernel().unavailable("cpu") is not None, reason="Inductor needs a C++ compiler"
)

TOKENS, HIDDEN, WORDS = 23, 16, 300
STEPS = {"float": (FLOAT,), "scaled": scaled(0.25), "softcapped": softcapped(3), "none": ()}
HOWS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "each, smoothed": {"label_smoothing": 0.3, "reduction": "none"},
}
FOUR_BLOCKS = 6 * WORDS * 2
# Each result has four roundings: of the logits, of their gradient, of a block's product, and of the multiplication
# by the upstream gradient. In float32, the sums over a few hundred words add more.
TOLERANCE = Tolerance(roundings=4, working_roundings=16 + WORDS**0.5 / 4, by_row=False)


class Ran(list):
    """The names of the programs that were started, and the bytes of the largest memory that held their logits."""

    most = 0


@pytest.fixture
def ran(everything_compiled, monkeypatch):
    """The programs that were started, including those for small inputs."""
    started, run = Ran(), programs._run

    def counted(function, z, by_row, factors):
        started.append(function.__name__)
        started.most = max(started.most, z.untyped_storage().nbytes())
        return run(function, z, by_row, factors)

    monkeypatch.setattr(programs, "_run", counted)
    return started


@pytest.fixture
def in_blocks(monkeypatch):
    """Sets the budget for logits, in bytes, and slices the weight so that the last slice is smaller."""

    def budget(nbytes):
        monkeypatch.setattr(chunks, "_BYTES", nbytes)
        monkeypatch.setattr(chunks, "_BYTES_FOR_WEIGHT", nbytes)
        monkeypatch.setattr(shared_chunks, "_WORDS", 128)

    return budget


def tensors(dtype=torch.float32, shape=(TOKENS,), words=WORDS, bias=True):
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden": (*shape, HIDDEN), "weight": (words, HIDDEN)} | ({"bias": (words,)} if bias else {})
    return {name: torch.randn(size, generator=generator).to(dtype).requires_grad_() for name, size in sizes.items()}


def labels_for(shape=(TOKENS,), words=WORDS):
    labels = torch.randint(0, words, shape, generator=torch.Generator().manual_seed(1))
    labels.view(-1)[::5] = -100
    return labels


def assert_right(ours, theirs, inputs, tolerance=TOLERANCE):
    found, eager = (outcome(function, inputs) for function in (ours, theirs))
    assert {name: each.dtype for name, each in found.values.items()} == {
        name: each.dtype for name, each in eager.values.items()
    }
    why = tolerance.excess(found, eager, outcome(theirs, inputs, dtype=torch.float64))
    assert not why, why


def losses(labels=None, **how):
    labels = labels_for() if labels is None else labels
    doors = (inductor.linear_cross_entropy, reference.linear_cross_entropy)
    return [functools.partial(door, labels=labels, **how) for door in doors]


@pytest.mark.parametrize(
    ("dtype", "steps", "how", "blocks"),
    covering(itertools.product((torch.float32, torch.bfloat16), STEPS, HOWS, (1, 4))),
    ids=str,
)
def test_losses_and_gradients_are_right(ran, in_blocks, dtype, steps, how, blocks):
    in_blocks((WORDS * TOKENS * 4) if blocks == 1 else FOUR_BLOCKS * dtype.itemsize // 2)
    assert_right(*losses(steps=STEPS[steps], **HOWS[how]), tensors(dtype))
    assert ran.count("_into_gradient") == blocks
    assert ran.count("_statistics") == blocks


@pytest.mark.parametrize("budget", [1, 3])
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 7])
def test_no_block_is_a_single_row_and_none_is_larger_than_it_must_be(ran, in_blocks, tokens, budget):
    in_blocks(budget * WORDS * 4)
    labels = labels_for((tokens,))
    assert_right(*losses(labels), tensors(shape=(tokens,)))
    blocks = chunks._blocks(tokens, WORDS * 4, chunks.Needs(True, True, True))
    rows = [block.stop - block.start for block in blocks]
    assert sum(rows) == tokens
    assert {2, 3}.issuperset(rows)
    assert ran.most == max(rows) * WORDS * 4


def test_many_blocks_add_up_in_float32(ran, in_blocks):
    in_blocks(1)
    hidden, weight = torch.ones(1024, HIDDEN), torch.zeros(WORDS, HIDDEN)
    inputs = {"hidden": hidden.bfloat16(), "weight": weight.bfloat16()}
    labels = torch.zeros(1024, dtype=torch.int64)
    assert_right(*losses(labels, reduction="sum"), inputs)  # in bfloat16, 256 + 1 is 256
    assert ran.count("_into_gradient") == 512


def test_more_logits_are_held_where_they_make_the_gradient_of_the_weight_one_matmul(ran, monkeypatch):
    monkeypatch.setattr(chunks, "_BYTES", 10 * WORDS * 4)
    inputs = tensors()
    for weight_needs, blocks in ((True, 1), (False, 3)):
        ran.clear()
        inputs["weight"].requires_grad_(weight_needs)
        inductor.linear_cross_entropy(**inputs, labels=labels_for()).backward()
        assert ran == ["_statistics", "_into_gradient"] * blocks


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("how", HOWS)
def test_what_is_not_finite_spreads_as_in_the_reference(ran, how, value):
    inputs, labels = tensors(), labels_for()
    with torch.no_grad():
        inputs["hidden"][0, 0] = value
    assert labels[0] == -100
    found, expected = (outcome(loss, inputs) for loss in losses(labels, **HOWS[how]))
    torch.testing.assert_close(found.values, expected.values, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert ran


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_are_left_to_the_reference(ran, dtype):
    inputs = tensors(dtype)
    found, expected = (outcome(loss, inputs).values for loss in losses())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not ran


@pytest.mark.parametrize(("tokens", "words"), first_quick([(0, WORDS), (1, WORDS), (5, 1), (1, 1)], 2))
def test_one_token_and_one_word_have_programs_and_none_is_the_reference(ran, tokens, words):
    inputs, labels = tensors(shape=(tokens,), words=words), torch.zeros(tokens, dtype=torch.int64)
    found, expected = (outcome(loss, inputs).values for loss in losses(labels))
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert bool(ran) == bool(tokens)


def test_small_inputs_of_the_public_function_do_not_pay_for_a_compiled_call(monkeypatch):
    monkeypatch.setattr(programs, "_run", None)
    functional.linear_cross_entropy(**tensors(), labels=labels_for()).backward()


def test_large_inputs_run_compiled_without_being_asked(ran):
    inputs, labels = tensors(shape=(512,), words=512), labels_for((512,), 512)
    found, expected = (loss(**inputs) for loss in losses(labels))
    torch.testing.assert_close(found, expected)
    assert ran == ["_statistics", "_into_gradient"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, hidden, labels):
        return inductor.linear_cross_entropy(hidden, self.head.weight, labels, self.head.bias)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_compiles_whole_exports_and_traces(ran):
    module, hidden, labels = Model(), torch.randn(TOKENS, HIDDEN), labels_for()
    expected = reference.linear_cross_entropy(hidden, module.head.weight, labels, module.head.bias)
    ways = (
        torch.compile(module, fullgraph=True, backend="aot_eager"),
        torch.export.export(module, (hidden, labels)).module(),
        torch.jit.trace(module, (hidden, labels), check_trace=False),
    )
    for way in ways:
        torch.testing.assert_close(way(hidden, labels), expected)
    assert not ran


def test_threads_may_all_be_first(ran, monkeypatch):
    monkeypatch.setattr(programs, "_programs", {})
    (ours, theirs), inputs, found = losses(), tensors(), []
    threads = [threading.Thread(target=lambda: found.append(ours(**inputs))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        torch.testing.assert_close(each, theirs(**inputs))


def test_two_programs_serve_all_tokens_vocabularies_and_numbers(ran, monkeypatch):
    monkeypatch.setattr(programs, "_programs", {})
    for tokens, words in ((8, 8), (2, 40), (40, 2), (17, 301), (301, 17)):
        inputs, labels = tensors(shape=(tokens,), words=words), labels_for((tokens,), words)
        for steps in ((FLOAT,), scaled(0.3), (FLOAT, Step("div", 0.7)), ()):
            for how in HOWS.values():
                inductor.linear_cross_entropy(**inputs, labels=labels, steps=steps, **how).sum().backward()
            inductor.linear_logprob(**inputs, labels=labels, steps=steps, entropy=True).entropy.sum().backward()
            with torch.inference_mode():
                own = {name: tensor + 0 for name, tensor in inputs.items()}
                inductor.linear_cross_entropy(**own, labels=labels + 0, steps=steps)
    assert [each.compilations for each in programs._programs.values()] == [1, 1]


def test_the_steps_are_numbers_around_tanhs():
    steps = (Step("mul", 3.0), Step("div", 2.0), Step("tanh"), FLOAT, Step("tanh"), Step("mul", 5.0), FLOAT)
    assert programs.factors_of(steps).tolist() == [1.5, 1.0, 5.0]
    assert programs.factors_of(()).tolist() == [1.0]
