"""Twenty steps of training, with the calls that transformers' Trainer makes, give the same fused as unfused."""

import copy

import pytest
import torch
import transformers
from support.losses import apply, told
from support.thorough import first_quick, quick_if
from support.tiny import BASE, EXPERTS, HEAD
from support.trainer import OPTIONS
from torch import nn
from torch.nn import functional

STEPS, PARTS = 20, 2
IGNORED = 7
"""The step whose second microbatch has only ignored labels."""

MODELS = {
    "qwen3": BASE | HEAD,
    "gemma2": BASE | HEAD | {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "cohere": BASE | {"logit_scale": 0.3},
    "granite": BASE | {"logits_scaling": 3.0},
    "llama": BASE | {"tie_word_embeddings": True},
    "qwen3_moe": BASE | HEAD | EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.1},
}
WAYS = ("alone", "int", "tensor", "shifted", "autocast")


def build(model_type):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    nn.init.normal_(model.get_output_embeddings().weight, std=0.3)
    return model


def batch(step, part):
    """Tokens and labels. The labels of a prompt are ignored, and in one microbatch all labels are."""
    ids = torch.randint(3, BASE["vocab_size"], (3, 11), generator=torch.Generator().manual_seed(PARTS * step + part))
    labels = ids.clone()
    labels[0, : 2 + 5 * part] = -100
    if step == IGNORED and part:
        labels[:] = -100
    return ids, labels


def called(way, ids, labels, count):
    """The arguments of a call in the given *way*. *count* is the number of labels that count in all microbatches."""
    given = {"input_ids": ids, "labels": labels}
    if way == "alone":
        return given
    given["num_items_in_batch"] = int(count) if way == "int" else count
    if way == "shifted":
        given["shift_labels"] = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return given


def train(model, way, seen=lambda output: None):
    """Train *model*; return the loss of each step, and the final parameters."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for step in range(STEPS):
        parts = [batch(step, part) for part in range(PARTS)]
        # With "alone", the mean over no labels would be 0 / 0, unfused as well.
        parts = parts[: 1 if way == "alone" and step == IGNORED else PARTS]
        count = sum((labels[..., 1:] != -100).sum() for _, labels in parts)
        optimizer.zero_grad()
        total = 0.0
        for ids, labels in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                output = model(**called(way, ids, labels, count))
            loss = output.loss / (len(parts) if way == "alone" else 1)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return torch.tensor(losses), {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "way"), quick_if([(name, way) for name in MODELS for way in WAYS], {("llama", "tensor")})
)
def test_twenty_steps_are_those_of_the_unfused_model(kernel, name, way):
    model = build(name)
    start = copy.deepcopy(model.state_dict())
    true, ended = train(model, way)
    assert true[-1] < true[0]

    model.load_state_dict(start)
    with apply(kernel, model) as applied:
        losses, parameters = train(model, way)
        assert told(applied) == (PARTS * STEPS - (way == "alone"), {}, 0)
    # Under autocast the kernel may round less than the model does, and the differences add up over twenty steps.
    loss, moved = (2e-2, 5e-2) if way == "autocast" else (1e-5, 1e-4)
    torch.testing.assert_close(losses, true, rtol=loss, atol=0)
    for key, value in ended.items():
        assert torch.dist(parameters[key], value) <= moved * torch.dist(value, start[key]), key

    model.load_state_dict(start)
    again, undone = train(model, way)
    assert torch.equal(again, true)
    assert all(torch.equal(undone[key], value) for key, value in ended.items())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_batch_without_a_label_that_counts_gives_what_it_gave(kernel, reduction):
    ids = batch(0, 0)[0]
    labels = torch.full_like(ids, -100)
    count = {"num_items_in_batch": 5} if reduction == "sum" else {}
    results = []
    for fused in (False, True):
        model = build("llama")
        if fused:
            applied = apply(kernel, model)
        loss = model(input_ids=ids, labels=labels, **count).loss
        loss.backward()
        results.append({name: each.grad for name, each in model.named_parameters()} | {"loss": loss.detach()})
    assert told(applied) == (1, {}, 0)
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, equal_nan=True, msg=name)


# --- the Trainer itself


class Losses(transformers.Trainer):
    """Keeps the loss of each microbatch."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("kept", []).append(loss.detach().float().cpu())
        return loss


HOWS = {
    "as it is": {},
    "in bfloat16": {"bf16": True},
    "labels smoothed": {"label_smoothing_factor": 0.1},
    "checkpointed": {"gradient_checkpointing": True},
}


def trained(model, folder, how):
    rows = [batch(step, 0) for step in range(6)]
    data = [{"input_ids": ids[row], "labels": labels[row]} for ids, labels in rows for row in range(3)]
    own = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 5, "logging_steps": 1000}
    arguments = transformers.TrainingArguments(str(folder), **{**OPTIONS, **own, **HOWS[how]})
    trainer = Losses(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:6],
        compute_metrics=lambda found: {"size": found.predictions.shape[-1]},
    )
    trainer.train()
    return torch.stack(trainer.kept), trainer


@pytest.mark.parametrize("how", first_quick(HOWS))
def test_the_trainer_trains_and_evaluates_as_ever(kernel, tmp_path, how):
    pytest.importorskip("accelerate")
    true, unfused = trained(build("qwen3"), tmp_path, how)
    model = build("qwen3")
    applied = apply(kernel, model)
    losses, trainer = trained(model, tmp_path, how)
    fused, real, _ = told(applied)
    assert fused == 10
    assert not real
    torch.testing.assert_close(losses, true, rtol=2e-2 if how == "in bfloat16" else 1e-4, atol=0)
    scores, before = trainer.evaluate(), unfused.evaluate()
    assert scores["eval_size"] == before["eval_size"] == BASE["vocab_size"]
    assert scores["eval_loss"] == pytest.approx(before["eval_loss"], rel=2e-2 if how == "in bfloat16" else 1e-4)
