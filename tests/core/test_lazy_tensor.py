"""A lazy tensor is the tensor that it stands for, at every use; and computes nothing before."""

import copy
import io
import pickle

import pytest
import torch
from support.heads import Scores, quick_sum, ran
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

made = []


def linear(x, weight):
    if not x.is_meta:
        made.append(1)
    return functional.linear(x, weight)


@pytest.fixture
def inputs():
    made.clear()
    ran.clear()
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((2, 3, 8), (11, 8)))
    return x, weight


def lazy(inputs, make=linear):
    return Scores.standing_for(make, *inputs, sum=(quick_sum, *inputs))


def gradients(result, inputs):
    for each in inputs:
        each.grad = None
    result.backward()
    return [each.grad for each in inputs]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def written(scores):
    scores = scores + 0 if type(scores) is Tensor else scores
    scores[..., 2] = -1.0
    return scores


USES = {
    "softmax": lambda s: s.softmax(-1),
    "a function": lambda s: functional.log_softmax(s, -1),
    "an operator": lambda s: 2 - s,
    "an index": lambda s: s[:, -1],
    "a mask": lambda s: s[s > 0],
    "together": lambda s: torch.cat([s, s]),
    "a product": lambda s: s @ torch.ones(11, 2),
    "a list": lambda s: torch.stack(list(s)),
    "in place": lambda s: s.mul_(3),
    "an element in place": written,
    "a cast": lambda s: s.double(),
    "an autograd.Function": Square.apply,
    "checkpointed": lambda s: checkpoint(torch.exp, s, use_reentrant=False),
    "checkpointed, reentrant": lambda s: checkpoint(torch.exp, s, use_reentrant=True),
    "noted first": lambda s: s.float().softmax(-1),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_gives_the_bits_and_gradients_of_the_original(use, inputs):
    want = USES[use](linear(*inputs))
    got = USES[use](lazy(inputs))
    assert torch.equal(got, want)
    upstream = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view_as(want)
    for one, other in zip(
        gradients((got * upstream).sum(), inputs), gradients((want * upstream).sum(), inputs), strict=True
    ):
        assert torch.equal(one, other)


ABOUT = {
    "shape": lambda s: s.shape,
    "size": lambda s: (s.size(), s.size(-1)),
    "contiguity": lambda s: s.is_contiguous(),
    "dtype": lambda s: (s.dtype, s.is_floating_point()),
    "device": lambda s: s.device,
    "len": len,
    "requires_grad": lambda s: (s.requires_grad, s.is_leaf),
    "numel": lambda s: (s.numel(), s.dim(), s.ndim, s.element_size()),
    "isinstance": lambda s: isinstance(s, Tensor),
}


@pytest.mark.parametrize("question", ABOUT)
def test_what_it_is_needs_no_values(question, inputs):
    want = ABOUT[question](linear(*inputs))
    made.clear()
    assert ABOUT[question](lazy(inputs)) == want
    assert not made


def test_what_is_foreseen_needs_no_values(inputs):
    scores = lazy(inputs)
    total = scores.float().sum()
    assert ran["sum"] == 1
    assert not made
    torch.testing.assert_close(total, linear(*inputs).sum())


def test_it_is_computed_once(inputs):
    scores = lazy(inputs)
    scores.softmax(-1), scores.argmax(-1), scores.tolist(), scores.float().exp()
    assert len(made) == 1


def test_once_it_is_computed_nothing_is_foreseen(inputs):
    scores = lazy(inputs)
    scores.mul_(2)
    torch.testing.assert_close(scores.sum(), 2 * linear(*inputs).sum())
    assert not ran


@pytest.mark.parametrize("within", [torch.no_grad, torch.inference_mode])
def test_a_use_without_gradients_leaves_those_of_a_later_use(within, inputs):
    scores = lazy(inputs)
    with within():
        assert not scores.softmax(-1).requires_grad
        assert not scores.sum().requires_grad
    want = gradients(linear(*inputs).exp().sum(), inputs)
    assert all(map(torch.equal, gradients(scores.exp().sum(), inputs), want))


def test_it_is_computed_under_the_autocast_of_its_call(inputs):
    with torch.autocast("cpu", torch.bfloat16):
        want = linear(*inputs)
        x, weight = (each.bfloat16() for each in inputs)
        scores = lazy((x, weight))
    assert torch.equal(scores.clone(), want)
    assert scores.dtype is torch.bfloat16


@pytest.mark.parametrize("number", [0, 1])
def test_a_use_after_an_input_was_changed_raises(number, inputs):
    scores = lazy(inputs)
    with torch.no_grad():
        inputs[number].add_(1)
    with pytest.raises(RuntimeError, match=r"softmax needs the values of a lazy float32\[2, 3, 11\].*changed in place"):
        scores.softmax(-1)


def test_a_use_after_an_input_was_freed_raises(inputs):
    scores = lazy(inputs)
    inputs[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed"):
        scores.softmax(-1)


class Adding(Scores):
    def foreseen(self, function, args, kwargs):
        return self.then(function, args, kwargs) if function is torch.add else NotImplemented


def adding(inputs, vector, used):
    return gradients(used(torch.add(Adding.standing_for(linear, *inputs), vector)).sum(), [*inputs, vector])


@pytest.mark.parametrize("used", [torch.exp, Square.apply])
def test_what_is_noted_may_have_further_tensors(used, inputs):
    vector = torch.linspace(-1, 1, 11).requires_grad_()
    want = gradients(used(torch.add(linear(*inputs), vector)).sum(), [*inputs, vector])
    assert all(map(torch.equal, adding(inputs, vector, used), want))


def test_a_use_after_one_of_them_was_changed_raises_and_its_source_is_there(inputs):
    vector, scores = torch.linspace(-1, 1, 11), Adding.standing_for(linear, *inputs)
    noted = torch.add(scores, vector)
    later = noted.clone()
    vector.zero_()
    assert torch.equal(scores.exp(), linear(*inputs).exp())
    for gone in (noted, later):
        with pytest.raises(RuntimeError, match=r"one of its inputs, float32\[11\], was changed in place"):
            gone.exp()


@pytest.mark.parametrize(
    "other", [torch.ones(11, device="meta"), torch.ones(11).as_subclass(type("Mine", (Tensor,), {}))]
)
def test_it_is_not_noted_with_a_tensor_of_another_kind(other, inputs):
    assert Adding.standing_for(linear, *inputs).then(torch.add, (other,), {}) is NotImplemented


REQUESTS = {
    "retain_grad": lambda s, total: s.retain_grad(),
    "autograd.grad": lambda s, total: torch.autograd.grad(total, s),
    "a hook that uses it": lambda s, total: (s.register_hook(lambda gradient: gradient.sum().item()), total.backward()),
    "a hook that keeps it": lambda s, total: (s.register_hook(kept.append), total.backward(), kept.pop() * 2),
    "a hook that changes it": lambda s, total: (
        s.register_hook(lambda gradient: torch.zeros(gradient.shape)),
        total.backward(),
    ),
}
kept = []


@pytest.mark.parametrize("request_", REQUESTS)
def test_its_own_gradient_is_refused_once_a_result_was_computed_without_it(request_, inputs):
    scores = lazy(inputs)
    total = scores.float().sum()
    with pytest.raises(RuntimeError, match="asks for the gradient of a lazy float32"):
        REQUESTS[request_](scores, total)


@pytest.mark.parametrize("read", [False, True])
def test_a_hook_that_waits_for_the_backward_is_called(read, inputs):
    scores, waited = lazy(inputs), []

    def waiting(gradient):
        waited.append((gradient.shape, gradient.dtype, gradient.device))
        return gradient

    total = scores.float().sum()
    removed, _ = scores.register_hook(waited.append), scores.register_hook(waiting)
    removed.remove()
    want = gradients(linear(*inputs).sum() + (linear(*inputs).exp().sum() if read else 0), inputs)
    got = gradients(total + (scores.exp().sum() if read else 0), inputs)
    torch.testing.assert_close(got, want)
    # With a use of the values there are two ways back.
    assert waited == [((2, 3, 11), torch.float32, torch.device("cpu"))] * (2 if read else 1)


class Passed(torch.autograd.Function):
    """Passes tensors on, to be called in the backward, as DistributedDataParallel does with what a model returns."""

    called = 0

    @staticmethod
    def forward(ctx, how, *tensors):
        return tuple(how(each) for each in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        Passed.called += 1
        return None, *gradients


@pytest.mark.parametrize("how", [Tensor.clone, Tensor.detach])
def test_it_may_be_passed_on_without_its_values(how, inputs):
    scores = lazy(inputs)
    total, passed = Passed.apply(how, scores.sum(), scores)
    assert (ran["sum"], made) == (1, [])
    assert torch.equal(passed, linear(*inputs))
    torch.testing.assert_close(gradients(total, inputs), gradients(linear(*inputs).sum(), inputs))


@pytest.mark.parametrize("computed_before", [False, True])
def test_passed_on_its_gradient_goes_through_what_passed_it(computed_before, inputs):
    scores = lazy(inputs)
    (passed,) = Passed.apply(Tensor.clone, scores)
    if computed_before:
        scores.exp()
    before = Passed.called
    assert not ran
    assert all(map(torch.equal, gradients(passed.sum(), inputs), gradients(linear(*inputs).sum(), inputs)))
    assert not ran
    assert Passed.called == before + 1


def test_its_own_gradient_is_there_if_it_is_asked_for_before(inputs):
    scores = lazy(inputs)
    scores.retain_grad()
    seen = []
    scores.register_hook(seen.append)
    scores.sum().backward()
    assert not ran
    assert torch.equal(seen[0], torch.ones(2, 3, 11))


def test_copies_are_plain_tensors(inputs):
    scores = lazy(inputs)
    want = linear(*inputs)
    buffer = io.BytesIO()
    torch.save(scores.detach(), buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(scores.detach()), pickle.loads(pickle.dumps(scores.detach())), torch.load(buffer)):
        assert type(copied) is Tensor
        assert torch.equal(copied, want)


def test_it_prints_as_the_tensor(inputs):
    assert repr(lazy(inputs)) == repr(linear(*inputs))


def _no_grad(inputs):
    with torch.no_grad():
        return lazy(inputs)


NOT_LAZY = {
    "no gradients recorded": _no_grad,
    "none wanted": lambda inputs: lazy([each.detach() for each in inputs]),
    "a subclass": lambda inputs: lazy([inputs[0], inputs[1].as_subclass(type("Mine", (Tensor,), {}))]),
    "on meta": lambda inputs: lazy([each.detach().to("meta").requires_grad_() for each in inputs]),
}


@pytest.mark.parametrize("case", NOT_LAZY)
def test_it_is_not_lazy_where_nothing_is_gained_or_known(case, inputs):
    assert NOT_LAZY[case](inputs) is NotImplemented


def test_a_compiled_function_may_take_one(inputs):
    want = linear(*inputs).exp().sum()
    compiled = torch.compile(lambda s: s.exp().sum(), backend="eager")
    assert torch.equal(compiled(lazy(inputs)), want)
