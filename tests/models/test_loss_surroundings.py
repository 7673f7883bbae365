"""The loss amid wrappers, hooks, adapters and compilers: training gives the same fused as unfused."""

import copy
import functools
import threading

import pytest
import torch
from support.losses import (
    Step,
    apply,
    assert_same,
    assert_step,
    gradients,
    ids,
    language_model,
    step,
    told,
)
from support.models import replicated
from support.thorough import thorough
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fuseplug_linear_cross_entropy.specimens import Causal

FUSED = (1, {}, 0)
ORIGINAL = (0, {}, 1)


# --- the call


def summed(model, **given):
    """Two batches before one backward."""
    model.zero_grad(set_to_none=True)
    losses = [model(input_ids=ids(seed=seed), labels=ids(seed=seed), **given).loss for seed in (0, 1)]
    loss = losses[0] + 3 * losses[1]
    loss.backward()
    return Step(loss.detach(), gradients(model))


def twice(model):
    """Two backwards through one graph."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids(), labels=ids()).loss
    (3 * loss).backward(retain_graph=True)
    (2 * loss).backward()
    return Step(loss.detach(), gradients(model))


def with_embeddings(model):
    model.zero_grad(set_to_none=True)
    embeddings = model.get_input_embeddings()(ids()).detach().requires_grad_()
    loss = model(inputs_embeds=embeddings, labels=ids()).loss
    loss.backward()
    return Step(loss.detach(), gradients(model) | {"embeddings": embeddings.grad})


def own_loss(logits, labels, vocab_size, **_):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)


def with_own_loss(model):
    model.loss_function = own_loss
    return step(model)


CALLS = {
    "once": (step, FUSED),
    "a tuple": (functools.partial(step, return_dict=False), FUSED),
    "two before a backward": (summed, (2, {}, 0)),
    "two backwards": (twice, FUSED),
    "from embeddings": (with_embeddings, FUSED),
    "a loss of the user's": (with_own_loss, FUSED),
    "the last logits only": (lambda model: step(model, labels=ids()[:, -4:], logits_to_keep=4), FUSED),
    "with a mask": (functools.partial(step, attention_mask=torch.ones(2, 9, dtype=torch.long)), FUSED),
    "float64": (lambda model: step(model.double()), ORIGINAL),
}


@pytest.mark.parametrize("call", CALLS)
def test_however_it_is_called(kernel, call):
    assert_step(kernel, language_model, *CALLS[call])


def frozen(*names, **changes):
    model = language_model(**changes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return model


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (functools.partial(language_model, tie_word_embeddings=True), FUSED),
        (functools.partial(frozen, "lm_head"), FUSED),
        (functools.partial(frozen, "model."), FUSED),
        (functools.partial(frozen, "lm_head", "embed", "layers"), FUSED),
    ],
    ids=["tied", "frozen head", "frozen body", "only the last norm"],
)
def test_whatever_is_tied_or_frozen(kernel, make, calls):
    assert_step(kernel, make, calls=calls)


# --- checkpointing


def checkpointed(reentrant):
    model = language_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_may_be_checkpointed(kernel, reentrant):
    assert_step(kernel, functools.partial(checkpointed, reentrant))


def around_the_model(reentrant, read):
    def run(model):
        model.zero_grad(set_to_none=True)

        def loss_of(embeddings):
            output = model(inputs_embeds=embeddings, labels=ids())
            return output.loss + (output.logits.square().mean() if read else 0)

        embeddings = model.get_input_embeddings()(ids())
        loss = checkpoint(loss_of, embeddings, use_reentrant=reentrant)
        loss.backward()
        return Step(loss.detach(), gradients(model))

    return run


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_model_may_be_checkpointed(kernel, reentrant, read):
    real = {"square": 1 if reentrant else 2} if read else {}
    # The first run of a reentrant checkpoint records no gradients, so the original computes it.
    assert_step(kernel, language_model, around_the_model(reentrant, read), (1, real, 1) if reentrant else (2, real, 0))


class InPart(Causal):
    """Its forward checkpoints what comes last: an activation, the head and the loss."""

    def forward(self, input_ids, labels=None):
        def last(embeddings):
            return self.after(functional.silu(embeddings), labels)[0]

        embeddings = self.embed_tokens(input_ids)
        return checkpoint(last, embeddings, use_reentrant=False), embeddings


def in_part():
    torch.manual_seed(0)
    return InPart()


def test_a_model_may_checkpoint_its_head_and_its_loss(kernel):
    # Its head runs again in the backward, where no kernel is in force.
    assert_step(kernel, in_part, lambda model: step(model, **model.dummy_inputs), (0, {}, 2))


def saved_on_cpu(model):
    with torch.autograd.graph.save_on_cpu():
        return step(model)


def anomalies_detected(model):
    with torch.autograd.set_detect_anomaly(True):
        return step(model)


def profiled(model):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return step(model)


@pytest.mark.parametrize("around", [saved_on_cpu, anomalies_detected, profiled])
def test_what_torch_puts_around_a_step(kernel, around):
    assert_step(kernel, language_model, around)


# --- accelerate, PEFT, quantisation


def under_accelerate(model):
    accelerate = pytest.importorskip("accelerate")
    wrapped = accelerate.utils.convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    model.zero_grad(set_to_none=True)
    output = wrapped(input_ids=ids(), labels=ids())
    assert output.logits.dtype is torch.float32
    output.loss.backward()
    return Step(output.loss.detach(), gradients(model), output)


def test_accelerate_widens_outputs(kernel):
    assert_step(kernel, language_model, under_accelerate, FUSED, loss=1e-2, gradient=5e-2)


def adapted(*targets, **changes):
    peft = pytest.importorskip("peft")
    model = language_model(**changes)
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False))


@pytest.mark.filterwarnings("ignore")
def test_lora_in_the_attention_leaves_the_loss_fused(kernel):
    assert_step(kernel, functools.partial(adapted, "q_proj", "v_proj"))


@pytest.mark.filterwarnings("ignore")
def test_lora_on_the_head_is_declined_for_a_reason_that_says_what_to_do(kernel):
    true, model = step(adapted("q_proj", "lm_head")), adapted("q_proj", "lm_head")
    applied = apply(kernel, model)
    assert not applied.report.fused
    (why,) = {entry.why_not for entry in applied.report.left_alone}
    assert "lm_head, is a peft.tuners.lora.layer.Linear" in why
    assert "if an adapter or quantisation replaced the head, leave the head out of it" in why
    assert_same(step(model), true, loss=0, gradient=0)


@pytest.mark.filterwarnings("ignore")
def test_lora_on_a_head_that_was_fused_is_right(kernel):
    true, model = step(adapted("q_proj", "lm_head")), language_model()
    applied = apply(kernel, model)
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    )
    assert_same(step(wrapped), true)
    # Lazy logits note an added vector, but the adapter adds a tensor of their shape.
    assert told(applied) == (1, {"add": 1}, 0)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_head_is_declined(kernel):
    quantised = torch.ao.quantization.quantize_dynamic(language_model().eval(), {nn.Linear}, dtype=torch.qint8)
    want = quantised(input_ids=ids(), labels=ids())
    applied = apply(kernel, quantised)
    (entry,) = applied.report.left_alone
    assert "is a torch.ao.nn.quantized.dynamic.modules.linear.Linear; a torch.nn.Linear is expected" in entry.why_not
    assert torch.equal(quantised(input_ids=ids(), labels=ids()).logits, want.logits)


# --- hooks


def seeing(register):
    def make():
        model = language_model()
        getattr(model.lm_head, register)(lambda *_: None)
        return model

    return make


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_a_hook_that_sees_the_logits_brings_back_the_original(kernel, register):
    true, model = step(seeing(register)()), language_model()
    applied = apply(kernel, model)
    handle = getattr(model.lm_head, register)(lambda *_: None)
    assert_same(step(model), true, loss=0, gradient=0)
    assert told(applied) == ORIGINAL
    assert "hooks that see its result" in str(applied.try_(input_ids=ids(), labels=ids()))
    handle.remove()
    assert_same(step(model), true)
    assert told(applied)[0] == 1


def test_a_hook_that_sees_the_input_of_the_head_leaves_it_fused(kernel):
    seen = []

    def make():
        model = language_model()
        model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
        return model

    assert_step(kernel, make)
    assert seen == [(2, 9, 16)] * 3


def test_a_hook_on_the_model_may_read_the_logits(kernel):
    seen = []

    def make():
        model = language_model()
        model.register_forward_hook(lambda module, args, output: seen.append(output.logits.argmax(-1)))
        return model

    assert_step(kernel, make, calls=(1, {}, 0))
    assert torch.equal(seen[0], seen[1])


# --- the logits that the model returns


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


TEACHER = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1)).softmax(-1)
USES = {
    "distillation": lambda logits: functional.kl_div(
        functional.log_softmax(logits, -1), TEACHER, reduction="batchmean"
    ),
    "an autograd.Function": lambda logits: Halved.apply(logits).square().mean(),
    "entropy": lambda logits: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
    "z-loss": lambda logits: logits.logsumexp(-1).square().mean(),
    "a contrastive term": lambda logits: (logits[0, -1] - logits[1, -1]).square().sum(),
}


@pytest.mark.parametrize("use", USES)
def test_what_else_is_computed_from_the_logits_adds_its_gradient(kernel, use):
    def run(model):
        model.zero_grad(set_to_none=True)
        output = model(input_ids=ids(), labels=ids())
        loss = output.loss + 0.5 * USES[use](output.logits)
        loss.backward()
        return Step(loss.detach(), gradients(model))

    true, model = run(language_model()), language_model()
    with apply(kernel, model) as applied:
        assert_same(run(model), true)
        fused, real, original = told(applied)
    assert (fused, sum(real.values()) > 0, original) == (1, True, 0)


def test_the_logits_that_are_read_later_are_those_of_the_original(kernel):
    model = language_model()
    want = step(model).output
    apply(kernel, model)
    found = step(model).output
    assert isinstance(found.logits, Tensor)
    assert type(found.logits) is not Tensor
    assert torch.equal(found.logits.detach(), want.logits.detach())
    assert torch.equal(found.to_tuple()[1].argmax(-1), want.logits.argmax(-1))
    assert torch.equal(found.logits[..., :-1, :], want.logits[..., :-1, :])


# --- the rest of a model's life


def test_evaluation_and_generation_are_untouched(kernel):
    model = language_model().eval()
    with torch.no_grad():
        want = model(input_ids=ids(), labels=ids())
    generated = model.generate(ids(), max_new_tokens=3, do_sample=False, pad_token_id=0)
    applied = apply(kernel, model)
    for within in (torch.no_grad, torch.inference_mode):
        with within():
            found = model(input_ids=ids(), labels=ids())
        assert type(found.logits) is Tensor
        assert torch.equal(found.logits, want.logits)
        assert torch.equal(found.loss, want.loss)
    assert type(model(input_ids=ids()).logits) is Tensor
    assert torch.equal(model.generate(ids(), max_new_tokens=3, do_sample=False, pad_token_id=0), generated)
    assert told(applied)[:2] == (0, {})


def test_for_inference_there_is_nothing_to_leave_uncomputed(kernel):
    applied = apply(kernel, language_model().eval(), mode="inference", strict=True)
    (entry,) = applied.report.entries
    assert "its results are lazy only where gradients are recorded, and for inference none are" in entry.why_not


def test_a_copy_is_fused_with_its_own_weights(kernel):
    model = language_model()
    applied = apply(kernel, model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    true = step(language_model())
    assert_same(step(copied), true)
    assert told(applied) == (0, {}, 0)
    loaded = language_model()
    loaded.load_state_dict(copied.state_dict())
    assert_same(step(loaded), true, loss=0, gradient=0)


def test_a_model_in_half_precision_is_fused(kernel):
    def make():
        return language_model().bfloat16()

    assert_step(kernel, make, loss=2e-2, gradient=5e-2)


def test_threads_each_have_their_own_scope(kernel):
    models = [language_model() for _ in range(2)]
    true = step(language_model())
    applied = [apply(kernel, model) for model in models]
    found = [None] * 2

    def work(number):
        found[number] = step(models[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, of in zip(found, applied, strict=True):
        assert_same(each, true)
        assert told(of) == FUSED


def test_wrong_labels_raise_what_they_raised(kernel):
    model, wrong = language_model(), ids().clone()
    wrong[0, 3] = 1000
    said = []
    for fused in (False, True):
        if fused:
            apply(kernel, model)
        for labels in (wrong, ids().float(), ids()[:1]):
            with pytest.raises((IndexError, ValueError, RuntimeError)) as raised:
                model(input_ids=ids(), labels=labels)
            said.append((type(raised.value), str(raised.value)))
    assert said[:3] == said[3:]
    assert_same(step(model), step(language_model()))


# --- compilers and functional transforms


@thorough
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_compiled_model_has_no_breaks_and_the_originals_bits(kernel, order):
    def compiled(model):
        return torch.compile(model, fullgraph=True, backend="aot_eager")

    torch._dynamo.reset()
    true, model = step(compiled(language_model(num_hidden_layers=1))), language_model(num_hidden_layers=1)
    torch._dynamo.reset()
    if order == "before":
        wrapped = compiled(model)
        apply(kernel, model)
    else:
        apply(kernel, model)
        wrapped = compiled(model)
    found = step(wrapped)
    assert type(found.output.logits) is Tensor
    assert_same(found, true, loss=0, gradient=0)


@thorough
def test_with_compiled_layers_the_loss_is_fused(kernel):
    def make():
        model = language_model()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        return model

    torch._dynamo.reset()
    true, model = step(make()), make()
    applied = apply(kernel, model)
    assert_same(step(model), true)
    assert told(applied) == FUSED


def functional_gradients(model):
    parameters = dict(model.named_parameters())

    def loss_of(parameters):
        return torch.func.functional_call(model, parameters, (), {"input_ids": ids(), "labels": ids()}).loss

    found, loss = torch.func.grad_and_value(loss_of)(parameters)
    return Step(loss, found)


def test_torch_func_differentiates_the_original(kernel):
    def make():
        return language_model(attn_implementation="eager")

    assert_step(kernel, make, functional_gradients, ORIGINAL, loss=0, gradient=0)


def test_other_parameters_for_one_call_are_used(kernel):
    def run(model):
        parameters = {name: (each * 1.5).detach().requires_grad_() for name, each in model.named_parameters()}
        loss = torch.func.functional_call(model, parameters, (), {"input_ids": ids(), "labels": ids()}).loss
        loss.backward()
        return Step(loss.detach(), {name: each.grad for name, each in parameters.items()})

    assert_step(kernel, language_model, run)


def test_traced_it_is_the_original(kernel):
    model = language_model()
    apply(kernel, model)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(input_ids=tokens, labels=tokens).loss

    exported = torch.export.export(Loss(), (ids(),), strict=False)
    torch.testing.assert_close(exported.module()(ids()), model(input_ids=ids(), labels=ids()).loss)


# --- copies and shards in one process


def test_a_replica_of_data_parallel_runs_the_original(kernel):
    def run(model):
        model.zero_grad(set_to_none=True)
        output = replicated(model, 1)(input_ids=ids(), labels=ids())
        assert type(output.logits) is Tensor
        output.loss.backward()
        return Step(output.loss.detach(), gradients(model))

    true, model = run(language_model()), language_model()
    apply(kernel, model)
    assert_same(run(model), true, loss=0, gradient=0)


class Gathered:
    """Imitates ZeRO-3: a parameter is empty except during forward and backward of its module."""

    def __init__(self, module):
        self.weight, self.whole = module.weight, module.weight.detach().clone()
        self.weight.ds_id, self.weight.ds_shape = 0, self.weight.shape
        self.release()
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda *_: self.release())
        module.register_full_backward_pre_hook(lambda *_: self.gather())
        module.register_full_backward_hook(lambda *_: self.release())

    def gather(self):
        self.weight.data = self.whole.clone()

    def release(self):
        self.weight.data = torch.empty(0)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_head_that_is_gathered_by_hooks_is_the_original(kernel, order):
    def run(model):
        loss = model(input_ids=ids(), labels=ids()).loss
        loss.backward()
        return Step(loss.detach(), gradients(model))

    model = language_model()
    Gathered(model.lm_head)
    true, model = run(model), language_model()
    if order == "before":
        applied = apply(kernel, model)
        Gathered(model.lm_head)
    else:
        Gathered(model.lm_head)
        applied = apply(kernel, model)
    assert_same(run(model), true, loss=0, gradient=0)
    assert told(applied) == ORIGINAL
