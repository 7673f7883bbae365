"""A lazy tensor is, at every use, the tensor that it stands for, and computes nothing before."""

import copy
import io
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from support.functions import Square
from support.heads import Scores, quick_sum, ran
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import to_dlpack

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


USES = {
    "a product": lambda s: s @ torch.ones(11, 2),
    "a list": lambda s: torch.stack(list(s)),
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


def test_a_checkpoint_that_began_after_the_call_may_run_again_once_it_is_real(inputs):
    want = gradients(linear(*inputs).sum().exp(), inputs)
    scores = lazy(inputs)
    result = checkpoint(lambda s: s.float().sum().exp(), scores, use_reentrant=False)
    scores.detach()
    assert all(map(torch.equal, gradients(result, inputs), want))
    assert not ran


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


class Noting(Scores):
    """Notes views, products and log-softmax."""

    def foreseen(self, function, args, kwargs):
        noted = (Tensor.__getitem__, Tensor.view, Tensor.__mul__, Tensor.log_softmax)
        return self.then(function, args, kwargs) if function in noted else super().foreseen(function, args, kwargs)


def test_once_real_it_is_a_plain_tensor_and_the_same_object(inputs):
    scores = lazy(inputs)
    scores.mine, reference = 3, weakref.ref(scores)
    scores.exp()
    assert (type(scores), scores.mine, reference() is scores) == (Tensor, 3, True)
    assert vars(scores) == {"mine": 3}


def test_what_wrappers_ask_of_what_a_model_returns_needs_no_values(inputs):
    scores = lazy(inputs)
    scores.sum()
    assert scores._base is None
    assert scores.grad_fn is not None
    assert not made


def test_what_gives_the_tensor_itself_gives_itself(inputs):
    class Flat(Scores):
        def foreseen(self, function, args, kwargs):
            return self.then(function, args, kwargs) if function is Tensor.flatten else NotImplemented

    scores = Flat.standing_for(linear, *inputs)
    assert scores.flatten(1, 1) is scores
    assert scores.flatten() is not scores


def test_nothing_of_it_is_kept_alive(inputs):
    scores = Noting.standing_for(linear, *inputs, sum=(quick_sum, *inputs))
    view, total = scores[0], scores.sum()
    references = [weakref.ref(scores), weakref.ref(view)]
    del scores
    view.exp()
    del view
    total.backward()
    assert [reference() for reference in references] == [None, None]


CONVERSIONS = {
    "to a device": lambda s: s.to(torch.device("cpu")),
    "to its name": lambda s: s.to("cpu"),
    "to both by keyword": lambda s: s.to(dtype=torch.bfloat16, device="cpu"),
    "a copy to": lambda s: s.to("cpu", copy=True),
    "a copy to a dtype": lambda s: s.to(torch.float32, copy=True),
    "float": lambda s: s.float(),
    "type by name": lambda s: s.type("torch.DoubleTensor"),
    "torch.clone": torch.clone,
    "several": lambda s: s.double().to("cpu").clone().contiguous().float(),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_on_its_device_it_is_converted_without_its_values(conversion, inputs):
    plain = linear(*inputs)
    want = CONVERSIONS[conversion](plain)
    made.clear()
    scores = lazy(inputs)
    got = CONVERSIONS[conversion](scores)
    assert not made
    assert (got is scores, got.dtype, got.shape) == (want is plain, want.dtype, want.shape)
    assert torch.equal(got, want)
    for one, other in zip(
        gradients(got.double().square().sum(), inputs), gradients(want.double().square().sum(), inputs), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wrong", [("nonsense",), (torch.float32, "cpu")])
def test_a_wrong_conversion_raises_what_it_raised(wrong, inputs):
    raised = []
    for scores in (linear(*inputs), lazy(inputs)):
        with pytest.raises((RuntimeError, TypeError)) as error:
            scores.to(*wrong)
        raised.append((type(error.value), str(error.value)))
    assert raised[0] == raised[1]


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is functional.linear else result


def test_where_a_mode_sees_functions_there_is_nothing_lazy(inputs):
    with Doubling():
        assert lazy(inputs, functional.linear) is NotImplemented


def test_a_default_device_is_no_such_mode(inputs):
    with torch.device("cpu"):
        scores = lazy(inputs)
        assert torch.equal(scores.exp(), linear(*inputs).exp())


def test_a_mode_that_sees_operations_sees_those_of_the_original(inputs):
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    for scores in (linear(*inputs), lazy(inputs)):
        with Seeing():
            scores.float().sum()
    assert seen == ["aten.sum.default"] * 2
    assert not ran


TRANSFORMED = {
    "grad": lambda s: torch.func.grad(lambda t: t.square().sum())(s),
    "grad of another": lambda s: torch.func.grad(lambda t: (t * s).sum())(torch.ones(2, 3, 11)),
    "vmap": lambda s: torch.func.vmap(lambda t: t.softmax(-1))(s),
    "vmap of another": lambda s: torch.func.vmap(lambda t: (t * s).sum())(torch.ones(4, 2, 3, 11)),
}


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_torch_func_transforms_what_it_stands_for(transform, inputs):
    want, scores = TRANSFORMED[transform](linear(*inputs)), lazy(inputs)
    assert torch.equal(TRANSFORMED[transform](scores), want)
    assert torch.equal(scores.softmax(-1), linear(*inputs).softmax(-1))


def test_threads_compute_it_once(inputs):
    scores, met, found = lazy(inputs), threading.Barrier(4), []

    def work():
        met.wait()
        found.append(scores.softmax(-1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert all(torch.equal(each, linear(*inputs).softmax(-1)) for each in found)
    assert len(found) == 4


@pytest.mark.parametrize("answered", [False, True])
def test_it_is_saved_as_a_plain_tensor(answered, inputs):
    scores, buffer = lazy(inputs), io.BytesIO()
    want = linear(*inputs)
    if answered:
        scores.sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save({"scores": scores}, buffer)
    assert b"fuseplug" not in buffer.getvalue()
    buffer.seek(0)
    for found in (torch.load(buffer)["scores"], pickle.loads(pickle.dumps(scores)), copy.copy(scores)):
        assert type(found) is Tensor
        assert torch.equal(found, want)


class Untraceable(torch.optim.Optimizer):
    """Changes one element of many in each parameter, which leaves no trace among the elements that are sampled."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.view(-1)[1] = 7


def with_many_scores():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((2, 8), (40_000, 8)))
    return x, weight


def test_the_step_of_an_optimizer_that_owns_an_input_is_a_change():
    inputs = with_many_scores()
    scores = lazy(inputs)
    Untraceable([inputs[1]]).step()
    with pytest.raises(RuntimeError, match="changed in place"):
        scores.exp()


def test_the_step_of_another_is_none(inputs):
    scores = lazy(inputs)
    Untraceable([torch.zeros(3, requires_grad=True)]).step()
    assert torch.equal(scores.exp(), linear(*inputs).exp())


def test_a_clone_outlives_a_step(inputs):
    scores, want = lazy(inputs), linear(*inputs)
    kept = scores.clone()
    scores.sum().backward()
    assert len(made) == 1  # `want` made it; the clone did not.
    torch.optim.SGD(inputs, 0.1).step()
    assert torch.equal(kept, want)


BEFORE = {
    "retain_grad": lambda s: s.retain_grad(),
    "a hook": lambda s: s.register_hook(seen.append),
    "several hooks": lambda s: register_multi_grad_hook([s], seen.append),
    "its node": lambda s: s.grad_fn.register_prehook(seen.append),
    "its edge": lambda s: seen.append(get_gradient_edge(s).node.name()),
}
seen = []


@pytest.mark.parametrize("request_", BEFORE)
def test_who_asks_for_its_gradient_first_gets_it(request_, inputs):
    found = []
    for scores in (linear(*inputs), lazy(inputs)):
        seen.clear()
        BEFORE[request_](scores)
        scores.square().sum().backward(inputs=[scores, *inputs])
        found.append((list(seen), scores.grad))
    assert str(found[0]) == str(found[1])
    assert torch.equal(found[1][1], 2 * linear(*inputs))


WITHOUT_ITS_OWN_VALUES = {
    "data": lambda s: setattr(torch.zeros(2, 3, 11), "data", s),
    "data of a parameter": lambda s: setattr(torch.nn.Parameter(torch.zeros(2, 3, 11)), "data", s),
    "dlpack": to_dlpack,
    "swapped": lambda s: torch.utils.swap_tensors(torch.zeros(2, 3, 11), s),
}


@pytest.mark.parametrize("use", WITHOUT_ITS_OWN_VALUES)
def test_memory_that_it_does_not_have_is_an_error(use, inputs):
    scores = lazy(inputs)
    with pytest.raises(RuntimeError, match=r"incompatible tensor type|Cannot access data pointer|Cannot swap"):
        WITHOUT_ITS_OWN_VALUES[use](scores)
    assert not made
    assert torch.equal(scores, linear(*inputs))


TAKEN_OVER = {
    "set_": lambda s: torch.zeros(2, 3, 11).set_(s.detach()),
    "a parameter": torch.nn.Parameter,
    "copy_": lambda s: torch.zeros(2, 3, 11).copy_(s),
    "from_dlpack": lambda s: torch.from_dlpack(s.detach()),
}


@pytest.mark.parametrize("use", TAKEN_OVER)
def test_who_takes_its_values_over_gets_them(use, inputs):
    taken = TAKEN_OVER[use](lazy(inputs))
    assert torch.equal(taken, linear(*inputs))
    assert isinstance(taken, torch.nn.Parameter) == (use == "a parameter")


def test_a_function_that_it_went_through_is_not_differentiated_with_other_weights(inputs):
    total = Square.apply(lazy(inputs)).sum()
    inputs[1].data.mul_(2)
    with pytest.raises(RuntimeError, match=r"since then float32\[11, 8\] was changed"):
        total.backward()


REQUESTS = {
    "backward": lambda s, total: total.backward(inputs=[s]),
    "backward of several": lambda s, total: torch.autograd.backward([total], inputs=[s]),
    "grad_fn": lambda s, total: s.grad_fn.register_prehook(kept.append),
    "an edge": lambda s, total: get_gradient_edge(s),
    "several hooks": lambda s, total: register_multi_grad_hook([s], kept.append),
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


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("request_", REQUESTS)
def test_its_own_gradient_is_refused_once_a_result_was_computed_without_it(request_, read, inputs):
    scores = lazy(inputs)
    total = scores.float().sum()
    if read:
        total = total + scores.exp().sum()
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
    # A use of the values adds a second path for the gradient.
    assert waited == [((2, 3, 11), torch.float32, torch.device("cpu"))] * (2 if read else 1)


class Passed(torch.autograd.Function):
    """Passes tensors on so that its backward is called, as DistributedDataParallel does with a model's outputs."""

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
