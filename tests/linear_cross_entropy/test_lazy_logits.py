"""What models do between head and loss is noted without the values, and gives the same as with them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fuseplug_linear_cross_entropy.recognise.lazy_logits import LazyLogits, lazy_linear
from fuseplug_linear_cross_entropy.recognise.lazy_rows import moved_rows
from fuseplug_linear_cross_entropy.reference import linear_cross_entropy

HIDDEN, VOCABULARY = 8, 13
EVERYTHING = frozenset({"added", "capped"})
MASK = torch.tensor([[True, False, True, True], [False, False, True, True]])
VECTOR = torch.linspace(-1, 1, VOCABULARY)


class Real:
    """Notes what needed the values."""

    def __init__(self):
        self.why = []

    def real(self, why):
        self.why.append(why)


def tensors(dtype=torch.float32, bias=False):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, HIDDEN), (VOCABULARY, HIDDEN), *([(VOCABULARY,)] if bias else [])]
    found = [torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return found if bias else [*found, None]


def lazy(inputs, checked=EVERYTHING):
    logits = lazy_linear(linear_cross_entropy, *inputs, checked)
    assert type(logits) is LazyLogits
    told = Real()
    logits.counted_by(told)
    return logits, told


def loss_of(logits):
    logits = logits.float()
    rows = logits.reshape(-1, logits.shape[-1])
    labels = torch.arange(len(rows)) * 3 % logits.shape[-1]
    labels[::4] = -100
    return functional.cross_entropy(rows, labels)


def gradients(loss, inputs):
    return torch.autograd.grad(loss, [each for each in inputs if each is not None], allow_unused=True)


NOTED = {
    "multiplied": lambda y: y * 0.5,
    "multiplied from the left": lambda y: 2 * y,
    "divided": lambda y: y / 3,
    "capped": lambda y: 3 * torch.tanh(y / 3),
    "a vector": lambda y: y + VECTOR.to(y.dtype),
    "a vector from the left": lambda y: VECTOR.to(y.dtype) + y,
    "a row": lambda y: torch.add(y, VECTOR.to(y.dtype).view(1, 1, -1)),
    "a vector, then scaled": lambda y: (y + VECTOR.to(y.dtype)) * 0.5,
    "two vectors": lambda y: y + VECTOR.to(y.dtype) + VECTOR.to(y.dtype).flip(0),
    "all but the last": lambda y: y[..., :-1, :].contiguous().view(-1, VOCABULARY),
    "one row of each": lambda y: y[:, -1],
    "a mask": lambda y: y[MASK],
    "a mask behind a slice": lambda y: y[:, 1:][MASK[:, 1:]],
    "a mask of one dimension": lambda y: y[:, MASK[0]],
    "a mask of whole rows": lambda y: y[MASK[0, :2], :, :],
    "rows by number": lambda y: y[:, torch.tensor([3, 0, 3])],
    "a row by a number in a tensor": lambda y: y[:, torch.tensor(1)],
    "rows up to a number in a tensor": lambda y: y[:, torch.tensor(1) : torch.tensor(3), : torch.tensor(9)],
    "a shape with a tensor": lambda y: y.view(torch.tensor(8), -1),
    "a part from a number in a tensor": lambda y: y.narrow(1, torch.tensor(1), 2),
    "pairs of numbers": lambda y: y[torch.tensor([0, 1]), torch.tensor([2, 3])],
    "the first words": lambda y: y[..., :7],
    "words in between": lambda y: y[:, 1:, 2:-3],
    "the first words of chosen rows": lambda y: y[..., :9][MASK],
    "words, then a vector": lambda y: y[..., :7] + VECTOR[:7].to(y.dtype),
    "another order": lambda y: y.transpose(0, 1).contiguous().view(-1, VOCABULARY),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", NOTED)
def test_the_loss_of_what_is_noted_needs_no_values_and_is_right(done, dtype, bias):
    inputs = tensors(dtype, bias)
    want = loss_of(NOTED[done](functional.linear(*inputs)))
    logits, told = lazy(inputs)
    got = loss_of(NOTED[done](logits))
    assert told.why == []
    # An added vector becomes part of the bias: one rounding less.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(got, want, **tolerance)
    for one, other in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


REAL = {
    "a wider vector": lambda y: y + VECTOR.double(),
    "a vector for each row": lambda y: y + torch.ones(2, 4, VOCABULARY),
    "a number": lambda y: y + 1,
    "a vector times something": lambda y: torch.add(y, VECTOR, alpha=2),
    "a vector, after a product": lambda y: y * 2 + VECTOR,
    "a column": lambda y: y + torch.ones(4, 1),
    "single words": lambda y: y[..., torch.tensor([1, 2])],
    "every second word": lambda y: y[..., ::2],
    "a mask of the words": lambda y: y[y > 0][:26].view(2, -1),
    "a mask in a list": lambda y: y[[True, False]],
    "nothing of the vocabulary": lambda y: y[..., 3:3].sum(-1, keepdim=True) + torch.zeros(2, 4, 5),
    "a product of tensors": lambda y: y * VECTOR,
    "the largest of each column": lambda y: y + y.argmax(1, keepdim=True),
    "the other way round": lambda y: 1 / y,
}


@pytest.mark.parametrize("done", REAL)
def test_what_is_not_noted_is_computed_from_the_values(done):
    inputs = tensors()
    want = loss_of(REAL[done](functional.linear(*inputs)))
    logits, told = lazy(inputs)
    got = loss_of(REAL[done](logits))
    assert len(told.why) == 1
    assert torch.equal(got, want)
    for one, other in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        assert torch.equal(one, other)


LARGEST = {
    "of all": lambda y: y.argmax(-1),
    "of a dimension by its number": lambda y: torch.argmax(y, dim=2),
    "kept as a dimension": lambda y: y.argmax(dim=-1, keepdim=True),
    "shifted and widened": lambda y: y[:, :-1].float().argmax(-1),
    "of negatives": lambda y: (y * -0.5).argmax(-1),
    "capped": lambda y: (3 * torch.tanh(y / 3)).argmax(-1),
    "of some words": lambda y: y[..., 2:9].argmax(-1),
    "of no rows": lambda y: y[:, :0].argmax(-1),
}


@pytest.mark.parametrize("few", [1 << 24, 1])
@pytest.mark.parametrize("done", LARGEST)
def test_the_largest_is_found_without_the_logits(done, few, monkeypatch):
    monkeypatch.setattr("fuseplug_linear_cross_entropy.recognise.lazy_rows._FEW", few)
    inputs = tensors(bias=True)
    logits, told = lazy(inputs)
    got, want = LARGEST[done](logits), LARGEST[done](functional.linear(*inputs))
    assert torch.equal(got, want)
    assert told.why == []
    # No result was computed without a gradient for the logits.
    (gradient,) = torch.autograd.grad(logits.square().sum(), logits)
    assert torch.equal(gradient, 2 * functional.linear(*inputs))


def selective_log_softmax(y, labels):
    """Computes log-probabilities of float32 logits as TRL, verl and OpenRLHF do."""
    selected = torch.gather(y, -1, labels.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in y])


def scored_in_parts(y, labels):
    """Scores chosen and rejected answers as LLaMA-Factory does."""
    logprobs = [part.log_softmax(-1) for part in y.split(1, dim=0)]
    parts = zip(logprobs, labels.chunk(2), strict=True)
    return torch.cat([torch.gather(p, 2, part.unsqueeze(2)).squeeze(2) for p, part in parts])


SCORED = {
    "selected": selective_log_softmax,
    "selected, shifted and scaled": lambda y, labels: selective_log_softmax(y[:, :-1] / 0.7, labels[:, 1:]),
    "selected of flat rows": lambda y, labels: selective_log_softmax(y.reshape(1, -1, VOCABULARY), labels.view(1, -1)),
    "selected, then all at once": lambda y, labels: y.gather(-1, labels[..., None]) - y.logsumexp(-1, keepdim=True),
    "in parts": scored_in_parts,
    "of each row": lambda y, labels: torch.stack(
        [row.log_softmax(-1).gather(-1, of_row[:, None]) for row, of_row in zip(y.unbind(), labels, strict=True)]
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", SCORED)
def test_trainers_score_labels_without_the_logits(done, dtype):
    inputs, labels = tensors(dtype), torch.arange(8).view(2, 4) * 5 % VOCABULARY
    want = SCORED[done](functional.linear(*inputs).float(), labels)
    logits, told = lazy(inputs)
    got = SCORED[done](logits.float(), labels)
    assert told.why == []
    torch.testing.assert_close(got, want)
    upstream = torch.linspace(-1, 1, got.numel()).view_as(got)
    for one, other in zip(*(torch.autograd.grad(y, inputs[:2], upstream) for y in (got, want)), strict=True):
        torch.testing.assert_close(one, other, **({"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}))


def test_labels_are_selected_in_one_pass():
    passes = []

    def counted(*args, statistics=(), **kwargs):
        passes.append(statistics)
        return linear_cross_entropy(*args, statistics=statistics, **kwargs)

    logits = lazy_linear(counted, *tensors(), EVERYTHING)
    selective_log_softmax(logits, torch.zeros(2, 4, dtype=torch.int64))
    assert passes == [("logsumexp",)]


FIRST_WORD = torch.zeros(2, 4, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("done", "needs"),
    [
        (lambda y: y.logsumexp(-1), "logsumexp"),
        (lambda y: y.gather(-1, FIRST_WORD.expand(-1, -1, 2)), "gather"),
        (lambda y: y.gather(-1, FIRST_WORD + VOCABULARY - 1) * 0 + y.logsumexp(1, keepdim=True)[..., :1], "logsumexp"),
        (lambda y: y.bfloat16().gather(-1, FIRST_WORD), "gather"),
        (lambda y: (y.gather(-1, FIRST_WORD), (y * 2).logsumexp(-1))[1], "logsumexp"),
        (lambda y: (y[:, 1:].gather(-1, FIRST_WORD[:, 1:]), y.logsumexp(-1))[1], "logsumexp"),
        (lambda y: torch.cat(y.split(5, -1), -1), "split"),
    ],
)
def test_what_no_pass_has_found_is_computed_from_the_values(done, needs):
    inputs = tensors()
    logits, told = lazy(inputs)
    torch.testing.assert_close(done(logits), done(functional.linear(*inputs)))
    assert told.why == [needs]


def test_a_kernel_without_statistics_leaves_the_selection_to_the_values():
    def older(hidden, weight, labels, bias, *, steps, ignore_index, reduction, label_smoothing):
        raise AssertionError("it computes a loss alone")

    inputs, labels = tensors(), FIRST_WORD.squeeze(-1)
    logits = lazy_linear(older, *inputs, EVERYTHING)
    assert torch.equal(selective_log_softmax(logits, labels), selective_log_softmax(functional.linear(*inputs), labels))


@pytest.mark.parametrize(("done", "needs"), [("capped", "tanh"), ("a vector", "add")])
def test_what_the_kernel_was_not_checked_on_is_not_noted(done, needs):
    inputs = tensors()
    logits, told = lazy(inputs, checked=frozenset())
    got = loss_of(NOTED[done](logits))
    assert told.why == [needs]
    assert torch.equal(got, loss_of(NOTED[done](functional.linear(*inputs))))


def test_a_vector_that_is_learnt_has_its_gradient():
    inputs, vector = tensors(), VECTOR.clone().requires_grad_()
    want = gradients(loss_of(functional.linear(*inputs) + vector), [*inputs, vector])
    logits, told = lazy(inputs)
    got = gradients(loss_of(logits + vector), [*inputs, vector])
    assert told.why == []
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_noted_sees_a_change_of_a_vector_that_it_was_noted_with():
    logits, vector = lazy(tensors())[0], VECTOR.clone()
    noted = logits + vector
    vector.fill_(0)
    with pytest.raises(RuntimeError, match="was changed in place"):
        noted.sum()


@pytest.mark.parametrize("keys", [(slice(None), torch.tensor([1, 0])), MASK])
def test_an_index_may_be_written_into_afterwards(keys):
    inputs, tensor = tensors(), keys if isinstance(keys, Tensor) else keys[1]
    want, noted = functional.linear(*inputs)[keys], lazy(inputs)[0][keys]
    before = tensor.clone()
    tensor.fill_(0)
    assert torch.equal(noted, want)
    tensor.copy_(before)


def test_a_bound_may_be_written_into_afterwards():
    inputs, start, parts = tensors(), torch.tensor(0), []
    logits, _ = lazy(inputs)
    for _ in range(2):
        parts.append(logits[:, start : start + 2])
        start += 2
    assert torch.equal(torch.cat([part.exp() for part in parts], 1), functional.linear(*inputs).exp())


class Making(TorchDispatchMode):
    """Notes the bytes behind each result."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.sizes.append(0 if result.is_meta else result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(("function", "shape"), [(Tensor.flatten, ()), (torch.flatten, (1,)), (Tensor.reshape, (-1,))])
def test_nothing_of_the_size_of_the_logits_is_made_to_see_what_moves(function, shape):
    rows = torch.arange(8).view(2, 4)
    with Making() as made:
        assert moved_rows(rows, VOCABULARY, function, shape, {}) is None
        assert moved_rows(rows, VOCABULARY, Tensor.flatten, (0, 1), {}).shape == (8,)
    assert 0 < max(made.sizes) <= rows.untyped_storage().nbytes()


@pytest.mark.parametrize("done", [lambda y: y.argmax(-1), lambda y: y.gather(-1, FIRST_WORD[:, :0])])
def test_there_may_be_no_tokens(done):
    inputs = [torch.randn(2, 0, HIDDEN, requires_grad=True), *tensors()[1:]]
    logits, told = lazy(inputs)
    assert torch.equal(done(logits), done(functional.linear(*inputs)))
    assert told.why == []


def test_a_tensor_of_another_kind_is_not_noted():
    class Mine(Tensor):
        pass

    logits, told = lazy(tensors())
    found = logits + VECTOR.as_subclass(Mine)
    assert type(found) is Mine
    assert told.why == ["add"]


def smoothed(logprobs, labels, epsilon=0.1):
    """The smoothed loss of the Trainer (transformers, ``LabelSmoother``)."""
    negative, labels = -logprobs, labels.unsqueeze(-1)
    ignored = labels.eq(-100)
    of_label = negative.gather(dim=-1, index=labels.clamp(min=0))
    even = negative.sum(dim=-1, keepdim=True, dtype=torch.float32)
    of_label.masked_fill_(ignored, 0.0)
    even.masked_fill_(ignored, 0.0)
    count = ignored.numel() - ignored.long().sum()
    return (1 - epsilon) * of_label.sum() / count + epsilon * even.sum() / (count * logprobs.shape[-1])


LABELS = torch.tensor([[0, 12, -100, 3], [-100, 5, 6, 12]])
SAMPLED = LABELS.clamp(min=0)
FROM_LOGPROBS = {
    "smoothed": lambda y: smoothed(functional.log_softmax(y, dim=-1), LABELS),
    "smoothed, in float32": lambda y: smoothed(y.float().log_softmax(-1), LABELS),
    "smoothed, of rows": lambda y: smoothed(torch.log_softmax(y * 0.5, 2)[:, :-1].contiguous(), LABELS[:, 1:]),
    "of labels": lambda y: torch.gather(y.log_softmax(-1), 2, SAMPLED.unsqueeze(-1)).squeeze(-1).sum(),
    "of labels, twice": lambda y: (
        lambda p: (p.gather(-1, SAMPLED.unsqueeze(-1)) * 2 - p.gather(-1, SAMPLED.flip(0).unsqueeze(-1))).sum()
    )(functional.log_softmax(y, -1, dtype=torch.float32)),
    "a ratio": lambda y: (
        functional.log_softmax(y / 0.7, -1).gather(-1, SAMPLED.unsqueeze(-1)) + 1.5
    ).exp().clamp(max=1.2).mean(),
    "the likelihood": lambda y: functional.nll_loss(
        functional.log_softmax(y.float(), -1).view(-1, VOCABULARY), LABELS.flatten()
    ),
    "a module": lambda y: torch.nn.NLLLoss(reduction="sum")(
        torch.nn.LogSoftmax(-1)(y.float().flatten(0, 1)), LABELS.flatten()
    ),
    "all words": lambda y: (
        lambda p: p.gather(-1, SAMPLED.unsqueeze(-1)).sum() - 0.1 * (torch.sum(p, (-1,)) / VOCABULARY).square().sum()
    )(y.log_softmax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", FROM_LOGPROBS)
def test_a_loss_that_is_made_of_log_probabilities_needs_no_values_and_is_right(done, dtype):
    inputs = tensors(dtype, bias=True)
    want = FROM_LOGPROBS[done](functional.linear(*inputs))
    logits, told = lazy(inputs)
    got = FROM_LOGPROBS[done](logits)
    assert told.why == []
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, want, **tolerance)
    for one, other in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance["rtol"], atol=tolerance["atol"])


REAL_LOGPROBS = {
    "over tokens": lambda y: y.log_softmax(1).sum(),
    "several of each row": lambda y: y.log_softmax(-1).gather(-1, SAMPLED.unsqueeze(-1).repeat(1, 1, 2)).sum(),
    "of all words first": lambda y: y.log_softmax(-1).sum(-1).sum(),
    "of all words of other rows": lambda y: (
        lambda p: p.gather(-1, SAMPLED.unsqueeze(-1)).sum() + p[:, 1:].sum(-1).sum()
    )(y.log_softmax(-1)),
    "of everything": lambda y: y.log_softmax(-1).sum(),
    "entropies": lambda y: (lambda p: -(p.exp() * p).sum(-1))(y.log_softmax(-1)).sum(),
    "in float64": lambda y: y.log_softmax(-1, dtype=torch.float64).gather(-1, SAMPLED.unsqueeze(-1)).sum(),
}


@pytest.mark.parametrize("done", REAL_LOGPROBS)
def test_other_things_made_of_log_probabilities_are_computed_from_the_values(done):
    inputs = tensors()
    want = REAL_LOGPROBS[done](functional.linear(*inputs))
    logits, told = lazy(inputs)
    got = REAL_LOGPROBS[done](logits)
    assert told.why
    torch.testing.assert_close(got, want)
    for one, other in zip(gradients(got, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", [-100, -1, VOCABULARY])
def test_an_index_that_is_no_word_is_refused_as_ever(index):
    logits, _ = lazy(tensors())
    labels = SAMPLED.clone().unsqueeze(-1)
    labels[0, 1] = index
    with pytest.raises(RuntimeError, match="out of bounds"):
        logits.log_softmax(-1).gather(-1, labels)


@pytest.mark.parametrize("done", [lambda y: y.log_softmax(-1), lambda y: -functional.log_softmax(y, -1)[:, 1:]])
def test_log_probabilities_become_what_they_stand_for(done):
    inputs = tensors(torch.bfloat16)
    want = done(functional.linear(*inputs))
    got = done(lazy(inputs)[0])
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    assert torch.equal(got, want)


def test_what_was_gathered_may_be_written_into():
    logits, _ = lazy(tensors())
    logprobs = logits.log_softmax(-1)
    first = -logprobs.gather(-1, SAMPLED.unsqueeze(-1))
    copy = first.detach().clone()
    (-logprobs).gather(-1, SAMPLED.unsqueeze(-1)).zero_()
    torch.testing.assert_close(first, copy)
    assert torch.equal(-logprobs.gather(-1, SAMPLED.unsqueeze(-1)), copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("done", FROM_LOGPROBS)
@pytest.mark.parametrize("late", [False, True])
def test_under_autocast_results_have_the_dtypes_and_values_of_the_original(done, dtype, late):
    inputs = tensors(dtype, bias=True)

    def run(logits):
        if not late:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return FROM_LOGPROBS[done](logits())
        values = logits()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return FROM_LOGPROBS[done](values)

    want = run(lambda: functional.linear(*inputs))
    got = run(lambda: lazy(inputs)[0])
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
