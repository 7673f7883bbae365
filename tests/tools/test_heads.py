"""A trainer's head is served if its function computes the same as a kernel, and serving can be undone."""

import contextlib
import gc
import logging
import types
import weakref

import pytest
import torch
from support import trainer_head
from support.losses import PlainKernel, ids, language_model
from support.managers import manager_of
from support.trainer_head import OUTPUTS, Scores, add_head, rewritten
from torch.utils.checkpoint import checkpoint

from fuseplug.fallback import by_reference
from fuseplug_linear_cross_entropy import linear_cross_entropy as public
from fuseplug_linear_cross_entropy import reference
from fuseplug_tools.integrations.heads import serve


def served(model, kernel=PlainKernel, **options):
    """Serve the one head of *model*, and return it."""
    (head,) = serve(model, manager_of(kernel), **options)
    return head


def scored(model, **autocast):
    """The results of one call, and the gradients by its log-probabilities and entropies."""
    model.zero_grad()
    with torch.autocast("cpu", **autocast) if autocast else contextlib.nullcontext():
        results = model(input_ids=ids(), labels=ids(), scored=True)
    (results["log_probs"].sum() + 0.3 * results["entropy"].sum()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: value.detach() for name, value in {**results, **gradients}.items()}


def kernel_of(compute, **changes):
    """`PlainKernel`, with *compute* as its function."""
    changed = staticmethod(compute)
    return type(
        "ChangedKernel", (PlainKernel,), {"kernel_id": "changed", "load": lambda _: changed.__func__, **changes}
    )


def test_a_head_is_served_and_gives_what_it_gave():
    model = language_model()
    before = add_head(model)
    true = scored(model)
    head = served(model)
    found = scored(model)
    assert vars(model)["forward"] is not before
    torch.testing.assert_close(found, true)
    assert (head.counter.fused, head.counter.original, head.kernel_id) == (1, 0, "plain_linear_cross_entropy")
    assert str(head.calls()) == "the model.forward:Scores: 1 by plain_linear_cross_entropy, 0 by the original"
    assert serve(model, manager_of(PlainKernel)) == [head]
    model(input_ids=ids(), labels=ids())  # the call without scores
    head.undo()
    assert vars(model)["forward"] is before
    assert served(model) is not head


def test_other_models_keep_their_heads():
    model, other = language_model(), language_model()
    add_head(model)
    before = add_head(other)
    head = served(model)
    scored(other)
    assert (head.counter.fused, vars(other)["forward"]) == (0, before)


def test_under_autocast():
    model = language_model()
    add_head(model)
    true = scored(model, dtype=torch.bfloat16)
    head = served(model)
    for name, value in scored(model, dtype=torch.bfloat16).items():
        largest = true[name].float().abs().max().item()
        torch.testing.assert_close(value, true[name], rtol=0, atol=0.03 * largest, msg=name)
    assert (head.counter.fused, head.counter.original) == (1, 0)


def test_its_first_call_may_be_checkpointed():
    model = language_model()
    add_head(model)
    head = served(model)

    def total(embeddings):
        return model(inputs_embeds=embeddings, labels=ids(), scored=True)["log_probs"].sum()

    checkpoint(total, model.get_input_embeddings()(ids()), use_reentrant=False).backward()
    assert (head.counter.fused, head.counter.original) == (1, 0)


def test_what_is_put_around_the_head_stays():
    """Accelerate does so: an object holds the forward, and the model keeps the one from before."""

    class Wrapper:
        def __init__(self, forward):
            self.model_forward = forward

        def __call__(self, *args, **kwargs):
            return self.model_forward(*args, **kwargs)

    model = language_model()
    before = add_head(model)
    wrapper = Wrapper(before)

    def outermost(*args, **kwargs):
        return wrapper(*args, **kwargs)

    model._original_forward, model.forward = before, outermost
    head = served(model)
    scored(model)
    assert (head.counter.fused, vars(model)["forward"]) == (1, outermost)
    assert vars(model)["_original_forward"] is not before
    head.undo()
    assert wrapper.model_forward is before
    assert vars(model)["_original_forward"] is before


def test_the_head_may_have_no_parameters():
    def forward(self, x):
        return Scores.apply(x)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())
    model[1].forward = types.MethodType(forward, model[1])
    for whole, path in ((model, "1"), (model[1], "")):
        head = served(whole)
        assert head.path == path
        head.undo()


def test_nothing_keeps_the_model_alive():
    model = language_model()
    add_head(model)
    served(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not [name for name in vars(trainer_head) if "fuseplug" in name]


def test_whoever_holds_the_copy_after_undo_calls_the_function():
    model = language_model()
    add_head(model)
    head = served(model)
    held = model.forward
    head.undo()
    held(input_ids=ids(), labels=ids(), scored=True)
    assert head.counter.fused == 0


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("entropy = log_z - (p * z).sum(-1)", "entropy = (log_z - (p * z).sum(-1)) / 0.6931", "entropy differs"),
        ("return z / temperature, slope", "return z, slope", "log_probs differs"),
        ("slope = scale / temperature", "slope = scale", "the gradient of hidden differs"),
        ("slope * (1 - bent * bent)", "slope * 1", "the gradient of hidden differs"),
        ("z = z.add_(bias)", "z = z", "log_probs differs"),
        ("p * (log_p + entropy.unsqueeze(-1))", "p * log_p", "the gradient of hidden differs"),
        ("grad.sum(0).to(bias.dtype)", "grad.sum(0).to(bias.dtype) * 2", "the gradient of bias differs"),
        ("(of_label >= top) &", "(of_label < top) &", "is_top1 differs"),
        ("ctx.mark_non_differentiable(*rest)", "ctx.mark_non_differentiable(is_top1)", "has a gradient"),
        ("if name in outputs else None", "if name else None", "it gives log_probs, entropy"),
        ("top = z.amax(-1)", "top = torch.rand_like(z).amax(-1)", "uses rand_like, which"),
        ("top = z.amax(-1)", "top = z.amax(-1) + sys.flags.debug", "uses sys, which"),
        ("top = z.amax(-1)", "top = z.amax(-1) + BY[0]", "uses BY, which"),
        (
            "results = Scores.apply(",
            "results = (lambda *all: Scores.apply(*all))(",
            "RebindError: cannot replace 'Scores'",
        ),
    ],
)
def test_a_function_that_computes_something_else_is_left_alone(old, new, why):
    module = rewritten(old, new)
    module.BY = [0]
    model = language_model()
    before = module.add_head(model)
    head = served(model)
    assert why in head.why_not
    assert head.why_not in str(head)
    assert vars(model)["forward"] is before


def wrong(*args, **kwargs):
    result = reference.linear_cross_entropy(*args, **kwargs)
    return result._replace(entropy=result.entropy * 1.01) if kwargs.get("statistics") else result


def wrong_when_large(hidden, *args, **kwargs):
    return (wrong if len(hidden) > 500 else reference.linear_cross_entropy)(hidden, *args, **kwargs)


def raising(*args, **kwargs):
    kwargs["statistics"] = kwargs.get("statistics", ())
    raise RuntimeError("no")


def declining(*args, statistics=(), **kwargs):
    return by_reference(reference.linear_cross_entropy, *args, statistics=statistics, **kwargs)


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (wrong, "entropy differs"),
        (wrong_when_large, "entropy differs"),
        (raising, "RuntimeError: no"),
        (declining, "it leaves such calls to its reference"),
    ],
)
def test_calls_are_the_functions_own_where_the_kernel_is_wrong(compute, why, caplog, monkeypatch):
    monkeypatch.setattr("fuseplug_linear_cross_entropy.heads.offering._has_statistics", lambda _: True)
    model = language_model()
    add_head(model)
    true = scored(model)
    head = served(model, kernel_of(compute))
    for _ in range(12):
        found = scored(model)
    torch.testing.assert_close(found, true, rtol=0, atol=0)
    assert (head.counter.fused, head.counter.original) == (0, 12)
    ((reason, _),) = head.counter.reasons.items()
    assert f"changed in float32: {why}" in reason
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert reason in warning


def call(**changes):
    """The arguments of a call of the head's function."""
    weight, bias = changes.pop("weight", torch.randn(40, 8)), changes.pop("bias", None)
    named = {"targets": torch.arange(6), "temperature": 1.0, "chunk_size": 16, "cap": None, "scale": 1.0, **changes}
    return (
        torch.randn(6, 8, dtype=changes.get("dtype", torch.float32)),
        weight,
        bias,
        *list(named.values())[:5],
        OUTPUTS,
    )


def split(weight):
    weight.ds_id = 1
    return weight


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (call(), None),
        (call()[:4], "it is called in a way that was not tried"),
        (call(temperature=0.0), "temperature, scale and cap are"),
        (call(cap=torch.tensor(3.0)), "temperature, scale and cap are"),
        (call(targets=torch.arange(6) - 100), "a target is no word"),
        (call(targets=torch.arange(6) + 35), "a target is no word"),
        (call(targets=torch.arange(6, dtype=torch.int32)), "a target is no word, or not in int64"),
        (call(dtype=torch.float64), "a dtype in which no model runs"),
        (call(weight=torch.randn(40, 8).as_subclass(type("Other", (torch.Tensor,), {}))), "a tensor is of a subclass"),
        (call(weight=split(torch.randn(40, 8))), "DeepSpeed has split the weight"),
        (call(weight=torch.randn(40, 8).half()), "float32 and float16: ValueError"),
        (call(bias=torch.randn(40).bfloat16()), "float32 and bfloat16: ValueError"),
    ],
)
def test_which_calls_the_kernel_computes(arguments, why):
    model = language_model()
    add_head(model)
    found = served(model)._offered.why_not(arguments)
    assert found is why is None or why in found


def test_calls_that_are_too_small_have_no_reason(monkeypatch, caplog):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE", raising=False)
    model = language_model()
    add_head(model)
    head = served(model, kernel_of(public, gains_from=lambda *_: 1 << 23))
    for _ in range(12):
        scored(model)
    assert (head.counter.fused, head.counter.original, head.counter.reasons) == (0, 12, {})
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_another_function_under_the_name_is_called(monkeypatch):
    model = language_model()
    add_head(model)
    head = served(model)
    monkeypatch.setattr(trainer_head, "Scores", type("Scores", (Scores,), {}))
    scored(model)
    assert head.counter.reasons == {"another Scores is there now": None}


def test_a_function_that_is_made_of_something_else_is_called(monkeypatch):
    model = language_model()
    add_head(model)
    head = served(model)
    monkeypatch.setattr(trainer_head, "logits_of", lambda *args: trainer_head.logits_of(*args))
    assert "has changed since it was read" in head._offered.why_not(call())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"exclude": "linear_cross_entropy"}, "no kernel of linear_cross_entropy"),
        ({"only": "model.layers.*"}, "no head is served with only="),
        ({"rounding": "exact"}, "no head is served with rounding="),
        ({"device": "cuda"}, "has programs of its own for cuda"),
    ],
)
def test_options(options, why):
    model = language_model()
    before = add_head(model)
    assert why in served(model, **options).why_not
    assert vars(model)["forward"] is before


def test_other_forwards_are_no_heads():
    model = language_model()
    assert serve(model, manager_of(PlainKernel)) == []
    model.forward = model.forward
    assert serve(model, manager_of(PlainKernel)) == []
