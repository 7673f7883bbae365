"""`FuseplugCallback` in transformers' Trainer: training gives the same as unfused, and the kernels compute it."""

from __future__ import annotations

import hashlib
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.kernels import NormKernel, RotaryKernel, ran, variant_of
from support.managers import manager_of
from support.models import Toy, tiny_llama
from support.thorough import first_quick, thorough
from support.trainer import losses, rows
from support.trainer import trainer_of as any_trainer_of
from torch import nn
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from fuseplug import UndoError  # noqa: E402
from fuseplug_tools.integrations.transformers import FuseplugCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("checked_once")

ROWS = rows(29)


@pytest.fixture
def callback():
    return FuseplugCallback(manager=manager_of(NormKernel, RotaryKernel))


def trainer_of(folder, model, callbacks, **options):
    return any_trainer_of(folder, model, ROWS, callbacks, **{"seed": 0, **options})


def parameters(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def trained(folder, model, callbacks=(), resume=None, **options):
    trainer = trainer_of(folder, model, list(callbacks), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj"]))


def plain(model):
    return model


WAYS = {
    "as it is": (plain, {}),
    "in bfloat16": (plain, {"bf16": True}),
    "checkpointed": (plain, {"gradient_checkpointing": True}),
    "checkpointed, reentrant": (
        plain,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "accumulated": (plain, {"gradient_accumulation_steps": 2}),
    "with LoRA": (lora, {}),
    "evaluated": (plain, {"eval_strategy": "steps", "eval_steps": 1}),
}


@pytest.mark.parametrize("way", first_quick(WAYS))
def test_it_trains_as_unfused_and_the_kernels_compute_every_call(tmp_path, caplog, way):
    caplog.set_level(logging.INFO, logger="fuseplug")
    make, options = WAYS[way]
    # The kernel for this rotation does not support the dtypes that autocast mixes.
    kernels = (NormKernel,) if way == "in bfloat16" else (NormKernel, RotaryKernel)
    callback = FuseplugCallback(manager=manager_of(*kernels))
    want = trained(tmp_path, make(tiny_llama()), **options)
    model = make(tiny_llama())
    ran.clear()
    trainer = trained(tmp_path, model, [callback], **options)
    wide = {"rtol": 2e-2, "atol": 1e-2} if way == "in bfloat16" else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(losses(trainer), losses(want), **wide)
    torch.testing.assert_close(parameters(trainer.model), parameters(want.model), **wide)
    applied = callback.applied_to(trainer.model)
    assert all(calls.fused and not calls.original for calls in applied.calls()), applied.calls()
    (record,) = [record for record in caplog.records if record.name == "fuseplug"]
    assert (record.levelname, record.getMessage()) == ("INFO", applied.report.summary())
    assert not applied.report.left_alone


def test_it_is_fused_before_anything_wraps_the_model_and_stays_so(tmp_path, callback):
    model = tiny_llama()
    trainer = trainer_of(tmp_path, model, [callback])
    assert callback.applied_to(model).report.fused
    before = callback.applied_to(model)
    trainer.train()
    assert callback.applied_to(model) is before
    assert not before.lost
    ran.clear()
    trainer.evaluate()
    assert ran["norm"]
    before.undo()
    assert not any("forward" in vars(module) for module in model.modules())


@thorough
def test_undone_at_the_end_it_is_put_on_again_for_more_training(tmp_path):
    model, callback = tiny_llama(), FuseplugCallback(manager=manager_of(NormKernel), undo=True)
    trainer = trained(tmp_path, model, [callback])
    for _ in range(2):
        assert not any("forward" in vars(module) for module in model.modules())
        ran.clear()
        trainer.evaluate()
        assert not ran["norm"]
        trainer.train()
        assert ran["norm"]


@thorough
@pytest.mark.parametrize("fuse", [False, True])
def test_a_model_that_is_made_anew_for_training_is_fused(tmp_path, callback, fuse):
    made = []

    def model_init():
        made.append(tiny_llama())
        return made[-1]

    trainer = trainer_of(tmp_path, None, [callback] if fuse else [], model_init=model_init)
    ran.clear()
    trainer.train()
    assert len(made) == 2
    assert trainer.model is made[1]
    assert bool(ran["norm"]) == fuse
    if fuse:
        assert all(calls.fused and not calls.original for calls in callback.applied_to(made[1]).calls())


@thorough
def test_what_is_saved_is_what_an_unfused_model_saves_and_training_resumes(tmp_path, callback):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trained(tmp_path / "whole", tiny_llama(), [callback], **options)
    saved = tmp_path / "whole" / "checkpoint-2"
    files = {path.name for path in saved.iterdir()}
    plain_ = trained(tmp_path / "plain", tiny_llama(), **options)
    assert files == {path.name for path in (tmp_path / "plain" / "checkpoint-2").iterdir()}
    fused, unfused = tmp_path / "fused", tmp_path / "unfused"
    callback.applied_to(whole.model)
    whole.save_model(str(fused))
    callback.applied_to(whole.model).undo()
    whole.save_model(str(unfused))
    assert hashes(fused) == hashes(unfused)
    resumed = trained(tmp_path / "again", tiny_llama(), [callback], resume=str(saved), **options)
    torch.testing.assert_close(parameters(resumed.model), parameters(whole.model))
    torch.testing.assert_close(parameters(plain_.model), parameters(whole.model), rtol=1e-3, atol=1e-4)


def hashes(folder):
    """The hash of each file, except for the arguments, which contain the time in a folder's name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path(folder).iterdir()
        if path.name != "training_args.bin"
    }


@thorough
def test_it_generates_while_it_trains(tmp_path, callback):
    class Generating(transformers.TrainerCallback):
        found: list = []  # noqa: RUF012 - used by this test only

        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.eval()
            self.found.append(
                model.generate(ROWS[0]["input_ids"][None], max_new_tokens=3, do_sample=False, pad_token_id=0)
            )
            model.train()

    seen = []
    for callbacks in ([], [callback]):
        Generating.found = []
        trained(tmp_path, tiny_llama(), [*callbacks, Generating])
        seen.append(torch.stack(Generating.found))
    assert torch.equal(*seen)


def test_kernels_that_do_nothing_are_named_once_in_the_log(tmp_path, caplog):
    class Late(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            model.model.norm.forward = model.model.norm.forward.__func__.__get__(model.model.norm)
            del model.model.norm.forward

    callback = FuseplugCallback(manager=manager_of(NormKernel))
    trained(tmp_path, tiny_llama(), [callback, Late])
    (record,) = [each for each in caplog.records if each.levelname == "WARNING" and each.name == "fuseplug"]
    assert "1 of 5 fused targets are not in use:\n  model.norm.forward: toy_norm: its replacement was taken off" in (
        record.getMessage()
    )


@thorough
def test_they_are_named_though_there_are_fewer_steps(tmp_path, caplog):
    callback = FuseplugCallback(manager=manager_of(NormKernel))
    trainer = trainer_of(tmp_path, tiny_llama(), [callback], max_steps=1)
    norm = trainer.model.model.norm
    trainer.model.model.norm = nn.Identity()
    trainer.train()
    assert "model.norm.forward: toy_norm: it was not called, though others were" in caplog.text
    assert norm is not trainer.model.model.norm


def test_where_nothing_is_fused_it_says_why(tmp_path, caplog):
    wrong = variant_of(NormKernel, function="support.kernels:rotary_reference")
    trainer_of(tmp_path, tiny_llama(), [FuseplugCallback(manager=manager_of(wrong))])
    assert "nothing is fused in LlamaForCausalLM: toy_norm" in caplog.text
    caplog.clear()
    trainer_of(tmp_path, tiny_llama(), [FuseplugCallback(manager=manager_of())])
    assert "no module of it has the op of an installed kernel" in caplog.text


def test_options_are_those_of_apply_all(tmp_path):
    callback = FuseplugCallback(manager=manager_of(NormKernel), skip="model.layers.1", strict=True)
    model = tiny_llama()
    trainer_of(tmp_path, model, [callback])
    assert len(callback.applied_to(model).report.fused) == 3


@thorough
def test_one_callback_serves_two_trainers(tmp_path, callback):
    models = [tiny_llama(), tiny_llama()]
    trainers = [trainer_of(tmp_path / str(number), model, [callback]) for number, model in enumerate(models)]
    for trainer, model in zip(trainers, models, strict=True):
        trainer.train()
        assert all(calls.fused for calls in callback.applied_to(model).calls())


@thorough
def test_it_is_added_to_every_trainer_without_touching_its_script(tmp_path, monkeypatch, callback):
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS, callback])
    model = tiny_llama()
    ran.clear()
    trained(tmp_path, model)
    assert ran["norm"] >= 20


def test_the_default_manager_is_that_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr("fuseplug.manager", manager_of(NormKernel))
    model = tiny_llama()
    callback = FuseplugCallback()
    trainer_of(tmp_path, model, [callback])
    assert callback.applied_to(model).report.fused


def test_a_callback_can_be_sent_to_another_process(callback):
    model = Toy()
    callback._applied[model] = object()
    sent = FuseplugCallback(only="layers.0")
    sent._applied[model] = object()
    assert pickle.loads(pickle.dumps(sent)).applied_to(model) is None


def test_a_model_that_others_move_is_planned_for_where_it_will_run():
    """FSDP and DeepSpeed move the model after the Trainer is made."""
    asked = []

    class Manager:
        def apply_all(self, model, **options):
            asked.append(options)
            return SimpleNamespace(report=SimpleNamespace(fused=[1], summary=lambda: ""))

    state = SimpleNamespace(is_world_process_zero=True)
    for model, device in ((Toy(), "cpu"), (Toy(), "cuda:1"), (Toy().to("meta"), "cuda:1")):
        args = SimpleNamespace(device=torch.device(device))
        FuseplugCallback(manager=Manager(), only="a").on_init_end(args, state, None, model=model)
    FuseplugCallback(manager=Manager(), device="npu").on_init_end(args, state, None, model=Toy())
    there = {"only": "a", "device": torch.device("cuda:1")}
    assert asked == [{"only": "a"}, there, there, {"device": "npu"}]


@thorough
def test_what_somebody_put_over_a_kernel_is_said_when_training_ends(tmp_path):
    callback = FuseplugCallback(manager=manager_of(NormKernel), undo=True)
    trainer = trainer_of(tmp_path, tiny_llama(), [callback])
    trainer.model.model.norm.forward = lambda x: x
    with pytest.raises(UndoError, match=r"model\.norm\.forward is now"):
        trainer.train()


@thorough
def test_the_trainer_compiles_one_graph_fused_as_unfused(tmp_path):
    torch_compile = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    want = trained(tmp_path, tiny_llama(), **torch_compile)
    torch._dynamo.reset()
    counters.clear()
    quiet = variant_of(NormKernel, function="support.kernels:quiet_norm")
    callback = FuseplugCallback(manager=manager_of(quiet))
    model = tiny_llama()
    trainer = trained(tmp_path, model, [callback], **torch_compile)
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    torch.testing.assert_close(losses(trainer), losses(want), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(parameters(model), parameters(want.model), rtol=1e-3, atol=1e-4)
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    applied = callback.applied_to(model)
    assert len(applied.report.fused) == 5
    assert applied.lost == []
    assert applied.check_in_use(1) == []
    applied.undo()
    assert not any("forward" in vars(module) for module in model.modules())
