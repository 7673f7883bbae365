"""Trainers that this project does not require. Each test runs if its trainer is installed."""

import logging

import pytest
import torch
from support.kernels import NormKernel, RotaryKernel, ran
from support.managers import manager_of
from support.models import tiny_llama
from support.thorough import thorough
from support.tokens import number_tokenizer
from support.trainer import OPTIONS, losses, rows

pytestmark = thorough

ROWS = [{name: row.tolist() for name, row in each.items()} for each in rows(29)]
# Not Adam: it turns rounding errors into steps where gradients are zero.
HOW = {**OPTIONS, "learning_rate": 1.0, "optim": "sgd", "bf16": False}


@pytest.fixture
def fusing():
    return manager_of(NormKernel, RotaryKernel)


@pytest.fixture
def callback(fusing):
    pytest.importorskip("accelerate")
    from fuseplug_tools.integrations.transformers import FuseplugCallback

    return FuseplugCallback(manager=fusing)


def trained_alike(callback, make):
    """Train what ``make(callbacks)`` returns, without *callback* and with it; return the trainer with it."""
    found = []
    for callbacks in ([], [callback]):
        trainer = make(callbacks)
        trainer.train()
        found.append((losses(trainer), [each.detach() for each in trainer.model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert all(calls.fused and not calls.original for calls in callback.applied_to(trainer.model).calls())
    return trainer


def test_trl_sft(tmp_path, callback, caplog):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    caplog.set_level(logging.WARNING, logger="fuseplug")

    def make(callbacks):
        return trl.SFTTrainer(
            tiny_llama(),
            trl.SFTConfig(str(tmp_path), **HOW),
            train_dataset=datasets.Dataset.from_list(ROWS),
            processing_class=number_tokenizer(),
            callbacks=callbacks,
        )

    trained_alike(callback, make)
    assert not [record for record in caplog.records if record.name == "fuseplug"]


@pytest.fixture
def with_loss():
    """A tiny model in training, and a manager with the loss kernel."""
    from support.losses import PlainKernel

    return tiny_llama().train(), manager_of(NormKernel, PlainKernel)


def add_trls_head(model):
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL puts no head of its own on models")
    utils.add_fused_lm_head(model)


def scored(model, times):
    for tokens in torch.randint(model.config.vocab_size, (times, 2, 9)):
        model(input_ids=tokens, labels=tokens, fused_lm_head=True).loss.backward()


def test_the_report_says_that_trls_head_goes_past_the_loss_kernel(with_loss):
    model, manager = with_loss
    add_trls_head(model)
    applied = manager.apply_all(model, allow="lazy_logits")
    (note,) = applied.report.notes
    assert note.startswith(
        "trl.trainer.utils._fused_forward is the forward of LlamaForCausalLM, and reads the weight of"
    )
    assert "go past plain_linear_cross_entropy, which then does nothing" in note
    assert note in " ".join(str(applied.report).split())
    without = manager.apply_all(tiny_llama(), allow="lazy_logits")
    assert without.report.notes == []


@pytest.mark.parametrize("first", [True, False])
def test_a_warning_says_so_after_ten_calls(with_loss, caplog, first):
    model, manager = with_loss
    if first:
        add_trls_head(model)
    applied = manager.apply_all(model, allow="lazy_logits")
    if not first:
        add_trls_head(model)
    scored(model, 9)
    assert not caplog.records
    scored(model, 5)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"1 of {len(applied.calls())} fused targets are not in use:\n"
        "  lm_head.forward: plain_linear_cross_entropy: it was not called, though targets beside it were, 10 times: "
        "trl.trainer.utils._fused_forward computes past it"
    )


def test_check_in_use_says_so_after_one(with_loss):
    model, manager = with_loss
    applied = manager.apply_all(model, allow="lazy_logits")
    add_trls_head(model)
    scored(model, 1)
    (found,) = applied.check_in_use(1)
    assert found.paths == ("lm_head",)
    assert found.why.endswith("trl.trainer.utils._fused_forward computes past it")


def large(completions, **_):
    """A reward: the sum of the numbers of each completion."""
    return [float(sum(map(int, completion.split()))) / 100 for completion in completions]


ONLINE = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 4, "beta": 0.1}
ANSWERS = [{"prompt": "3 4 5", "completion": f" 6 {n}", "label": bool(n % 2)} for n in range(3, 11)]
PAIRS = [{"prompt": "3 4 5", "chosen": f" 6 {n}", "rejected": f" 8 {n}"} for n in range(3, 11)]
PROMPTS = [{"prompt": f"{n} {n + 1} 5"} for n in range(3, 11)]
TRAINED = {
    "SFT": (ROWS, {}),
    "DPO": (PAIRS, {}),
    "KTO": (ANSWERS, {}),
    "GRPO": (PROMPTS, ONLINE),
    "RLOO": (PROMPTS, ONLINE),
}
"""For each of TRL's trainers: its data, and the options that only it needs."""


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "LoRA"])
@pytest.mark.parametrize("name", TRAINED)
def test_trls_head_is_served(tmp_path, name, adapted):
    trl, datasets, peft = (pytest.importorskip(package) for package in ("trl", "datasets", "peft"))
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL puts no head of its own on models")
    from support.losses import PlainKernel, language_model

    from fuseplug_tools.integrations.heads import serve
    from fuseplug_tools.integrations.transformers import FuseplugCallback

    manager, (data, options) = manager_of(PlainKernel), TRAINED[name]
    language_model().save_pretrained(tmp_path / "model")  # trainers load the reference model from this folder, too
    options = {**HOW, "learning_rate": 0.1, **options}
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4) if adapted else None

    def trained(callbacks):
        torch.manual_seed(0)
        trainer = getattr(trl, f"{name}Trainer")(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
            *([large] if "num_generations" in options else []),
            args=getattr(trl, f"{name}Config")(str(tmp_path), **options),
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=number_tokenizer(),
            callbacks=callbacks,
            peft_config=config,
        )
        if callbacks and getattr(trainer, "ref_model", None) is not None:
            assert serve(trainer.ref_model, manager)  # so that an unchanged policy has the reference's bits
        trainer.train()
        timed = ("runtime", "second", "time", "mfu", "flos", "throughput")
        lines = [line for line in trainer.state.log_history if "loss" in line]
        return trainer, [{k: v for k, v in line.items() if not any(word in k for word in timed)} for line in lines]

    _, true = trained([])
    callback = FuseplugCallback(manager=manager, undo=True)
    trainer, found = trained([callback])
    (head,) = callback.heads
    assert len(true) == HOW["max_steps"]
    assert found == [{key: pytest.approx(value, rel=1e-3, abs=1e-4) for key, value in line.items()} for line in true]
    assert head.counter.fused >= HOW["max_steps"]
    assert (head.counter.original, head.counter.reasons) == (0, {})
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if adapted else model
    assert "_ChunkedLogProbFunction" in vars(model)["forward"].__code__.co_names


def test_trl_dpo_leaves_the_reference_model_alone(tmp_path, callback, fusing):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(
        [{"prompt": "3 4 5", "chosen": f" 6 {n}", "rejected": f" 8 {n}"} for n in range(3, 11)]
    )
    references = []

    def make(callbacks):
        references.append(tiny_llama())
        return trl.DPOTrainer(
            tiny_llama(),
            references[-1],
            args=trl.DPOConfig(str(tmp_path), **HOW),
            train_dataset=data,
            processing_class=number_tokenizer(),
            callbacks=callbacks,
        )

    trainer = trained_alike(callback, make)
    assert fusing.applied_to(trainer.model) is not None
    assert fusing.applied_to(references[-1]) is None


def test_trl_grpo_leaves_the_reference_model_alone(tmp_path, callback, fusing):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    data = datasets.Dataset.from_list([{"prompt": f"{n} {n + 1} 5"} for n in range(3, 11)])
    tiny_llama().save_pretrained(tmp_path / "model")  # GRPO loads the reference model from this folder, too
    completed = []

    def large(completions, **_):
        """A reward: the sum of the numbers of each completion."""
        completed.append(completions)
        return [float(sum(map(int, each.split()))) / 100 for each in completions]

    references = []

    def make(callbacks):
        torch.manual_seed(0)
        trainer = trl.GRPOTrainer(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
            large,
            args=trl.GRPOConfig(
                str(tmp_path),
                **{**HOW, "per_device_train_batch_size": 4},
                num_generations=4,
                max_completion_length=6,
                beta=0.1,
            ),
            train_dataset=data,
            processing_class=number_tokenizer(),
            callbacks=callbacks,
        )
        references.append(trainer.ref_model)
        return trainer

    trainer = trained_alike(callback, make)
    assert fusing.applied_to(trainer.model) is not None
    assert references[-1] is not None
    assert fusing.applied_to(references[-1]) is None
    half = len(completed) // 2
    assert completed[:half] == completed[half:]


def test_lightning(tmp_path, fusing):
    lightning = pytest.importorskip("lightning")

    class Training(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = tiny_llama(), []

        def training_step(self, batch, _):
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.tensor([row["input_ids"] for row in ROWS]), batch_size=2)
    found = []
    for fuse in (False, True):
        module = Training()
        if fuse:
            applied = fusing.apply_all(module)
            ran.clear()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        trainer.fit(module, data)
        found.append(torch.stack(module.losses))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert ran["norm"] == 20
    assert applied.lost == []
    assert applied.check_in_use(1) == []
