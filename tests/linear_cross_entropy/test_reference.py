"""The reference agrees with torch's own functions, and its errors name what does not fit."""

import pytest
import torch
from torch.distributions import Categorical
from torch.nn import functional

from fuseplug_linear_cross_entropy import FLOAT, Step, scaled, softcapped
from fuseplug_linear_cross_entropy.reference import STATISTICS, linear_cross_entropy, linear_logprob

WORDS = 13
STEPS = {
    "none": ((), lambda y: y),
    "float": ((FLOAT,), lambda y: y.float() if y.dtype != torch.float64 else y),
    "scaled": (scaled(0.25), lambda y: (y * 0.25).to(torch.promote_types(y.dtype, torch.float32))),
    "softcapped": (
        softcapped(3),
        lambda y: (torch.tanh(y / 3.0) * 3.0).to(torch.promote_types(y.dtype, torch.float32)),
    ),
    "float first": ((FLOAT, Step("div", 0.7)), lambda y: y.to(torch.promote_types(y.dtype, torch.float32)) / 0.7),
}


def tensors(dtype=torch.float64, shape=(2, 5), bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((*shape, 4), (WORDS, 4), (WORDS,))
    )
    labels = torch.randint(0, WORDS, shape, generator=generator)
    labels.view(-1)[::3] = -100
    return hidden, weight, labels, offset if bias else None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("reduction", "label_smoothing"), [("mean", 0.0), ("mean", 0.1), ("sum", 0.0), ("none", 0.0), ("none", 0.2)]
)
def test_it_is_the_cross_entropy_of_the_linear_layer_bit_for_bit(dtype, name, reduction, label_smoothing):
    hidden, weight, labels, bias = tensors(dtype)
    steps, by_hand = STEPS[name]
    how = {"reduction": reduction, "label_smoothing": label_smoothing}
    found = linear_cross_entropy(hidden, weight, labels, bias, steps=steps, **how)
    logits = by_hand(functional.linear(hidden, weight, bias)).flatten(0, -2)
    expected = functional.cross_entropy(logits, labels.flatten(), **how)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected.view_as(found))
    leaves = (hidden, weight, bias)
    pairs = zip(*(torch.autograd.grad(loss.sum(), leaves) for loss in (found, expected)), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_a_smoothing_it_is_what_every_smoothing_is_a_mixture_of(dtype):
    hidden, weight, labels, bias = tensors(dtype)
    both = linear_cross_entropy(hidden, weight, labels, bias, reduction="none", label_smoothing=None)
    assert both.shape == (2, *labels.shape)
    for smoothing in (0.0, 0.3, 1.0):
        mixed = torch.lerp(*both, smoothing)
        expected = linear_cross_entropy(
            hidden, weight, labels, bias, reduction="none", label_smoothing=smoothing, steps=(FLOAT,)
        )
        torch.testing.assert_close(mixed, expected)
        pairs = (
            torch.autograd.grad(loss.sum(), (hidden, weight, bias), retain_graph=True) for loss in (mixed, expected)
        )
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_label_that_is_ignored_is_the_one_that_is_named(reduction):
    hidden, weight, labels, _ = tensors()
    labels = labels.clamp(min=0)
    found = linear_cross_entropy(hidden, weight, labels, ignore_index=0, reduction=reduction)
    losses = functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none")
    kept = losses.view_as(labels) * (labels != 0)
    expected = {"none": kept, "sum": kept.sum(), "mean": kept.sum() / (labels != 0).sum()}[reduction]
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)


def test_where_all_labels_are_ignored_the_mean_is_nan_and_the_gradients_are_zero():
    hidden, weight, labels, bias = tensors()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), bias)
    assert loss.isnan()
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight, bias)))


@pytest.mark.parametrize("name", STEPS)
def test_log_probability_and_entropy_are_those_of_a_categorical_distribution(name):
    hidden, weight, labels, bias = tensors()
    steps, by_hand = STEPS[name]
    found = linear_logprob(hidden, weight, labels, bias, steps=steps, entropy=True)
    distribution = Categorical(logits=by_hand(functional.linear(hidden, weight, bias)))
    counts = labels != -100
    torch.testing.assert_close(found.logprob, distribution.log_prob(labels.clamp(min=0)) * counts)
    torch.testing.assert_close(found.entropy, distribution.entropy() * counts)
    assert linear_logprob(hidden, weight, labels, bias, steps=steps).entropy is None


def test_the_loss_is_minus_the_log_probability():
    hidden, weight, labels, bias = tensors()
    losses = linear_cross_entropy(hidden, weight, labels, bias, reduction="none")
    assert torch.equal(losses, -linear_logprob(hidden, weight, labels, bias).logprob)


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_of_log_probability_and_entropy_are_those_of_the_functions(entropy):
    hidden, weight, labels, bias = tensors(shape=(4,))

    def results(hidden, weight, bias):
        found = linear_logprob(hidden, weight, labels, bias, steps=softcapped(2), entropy=entropy)
        return tuple(each for each in found if each is not None)

    assert torch.autograd.gradcheck(results, (hidden, weight, bias))


def test_a_word_that_cannot_be_adds_nothing_to_the_entropy_and_its_gradient_is_finite():
    hidden, weight, labels, bias = tensors()
    bias = bias.detach().clone()
    labels = labels.clamp(0, WORDS - 2)
    found = linear_logprob(hidden, weight[:-1], labels, bias[:-1], entropy=True)
    bias[-1] = -torch.inf
    masked = linear_logprob(hidden, weight, labels, bias, entropy=True)
    torch.testing.assert_close(masked, found)
    gradients = (torch.autograd.grad(sum(each.sum() for each in way), hidden)[0] for way in (masked, found))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_statistics_are_what_their_formulas_say_and_the_loss_is_the_same(name, reduction):
    hidden, weight, labels, bias = tensors()
    steps, by_hand = STEPS[name]
    results = linear_cross_entropy(
        hidden, weight, labels, bias, steps=steps, reduction=reduction, statistics=("is_top1", *STATISTICS)
    )
    y, counts = by_hand(functional.linear(hidden, weight, bias)), labels != -100
    p = y.softmax(-1)
    expected = {
        "loss": linear_cross_entropy(hidden, weight, labels, bias, steps=steps, reduction=reduction),
        "entropy": Categorical(probs=p).entropy() * counts,
        "logsumexp": y.exp().sum(-1).log() * counts,
        "mean_logits": y.mean(-1) * counts,
        "log_sum_sq_probs": p.square().sum(-1).log() * counts,
        "is_top1": (y.argmax(-1) == labels) & counts,
    }
    torch.testing.assert_close(results._asdict(), expected)


def test_what_is_not_asked_for_is_none():
    results = linear_cross_entropy(*tensors()[:3], statistics=("entropy",))
    assert [name for name, value in results._asdict().items() if value is not None] == ["loss", "entropy"]


def test_gradients_of_statistics_are_those_of_the_formulas():
    hidden, weight, labels, bias = tensors(shape=(4,))
    names = tuple(name for name in STATISTICS if name != "is_top1")

    def results(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, labels, bias, steps=softcapped(2), statistics=names)[:-1]

    assert torch.autograd.gradcheck(results, (hidden, weight, bias))


def test_a_function_of_a_kernel_that_computes_no_statistics_is_an_error():
    with pytest.raises(TypeError, match="computes a loss without statistics"):
        linear_cross_entropy(*tensors()[:3], statistics=("entropy",), compute=lambda *_: torch.zeros(()))


@pytest.mark.parametrize("steps", [(), (FLOAT,), scaled(0.5)], ids=str)
def test_under_autocast_it_is_what_the_functions_of_torch_are_there(steps):
    hidden, weight, labels, bias = tensors(torch.float32)
    factor = steps[0].number if steps and steps[0].kind == "mul" else 1
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, labels, bias, steps=steps)
        logits = (functional.linear(hidden, weight, bias) * factor).flatten(0, 1)
        expected = functional.cross_entropy(logits.float() if FLOAT in steps else logits, labels.flatten())
    assert found.dtype is expected.dtype is torch.float32
    assert torch.equal(found, expected)
    pairs = zip(*(torch.autograd.grad(loss, (hidden, weight, bias)) for loss in (found, expected)), strict=True)
    for ours, theirs in pairs:
        assert ours.dtype is torch.float32
        assert torch.equal(ours, theirs)


def test_autocast_leaves_float64_as_it_is():
    hidden, weight, labels, bias = tensors()
    expected = linear_cross_entropy(hidden, weight, labels, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, bias), expected)


def test_on_meta_it_has_a_shape():
    hidden, weight, labels, _ = (each.to("meta") for each in tensors())
    assert linear_cross_entropy(hidden, weight, labels, reduction="none").shape == labels.shape


def test_hidden_states_may_have_no_width():
    labels = torch.zeros(2, 3, dtype=torch.int64)
    loss = linear_cross_entropy(torch.zeros(2, 3, 0), torch.zeros(WORDS, 0), labels)
    torch.testing.assert_close(loss, torch.tensor(WORDS).log())


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 1, 3)])
def test_any_number_of_tokens_in_any_rank(shape):
    hidden, weight, _, _ = tensors(shape=shape)
    labels = torch.zeros(shape, dtype=torch.int64)
    assert linear_cross_entropy(hidden, weight, labels, reduction="none").shape == shape
    found = linear_logprob(hidden, weight, labels, entropy=True)
    assert found.logprob.shape == found.entropy.shape == shape
    assert bool(linear_cross_entropy(hidden, weight, labels).isnan()) == (0 in shape)
    assert linear_cross_entropy(hidden, weight, labels, reduction="sum").shape == ()


@pytest.mark.parametrize("label", [-1, WORDS])
def test_a_label_that_is_no_word_is_an_error(label):
    hidden, weight, labels, _ = tensors()
    labels[0, 0] = label
    with pytest.raises(IndexError, match=rf"Target {label} is out of bounds\."):
        linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(IndexError, match=str(label)):
        linear_logprob(hidden, weight, labels)
