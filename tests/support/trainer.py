"""A few steps in transformers' Trainer, on the CPU and the same each time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Trainer

OPTIONS: Mapping[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
"""The default options of `TrainingArguments`."""


def rows(words: int) -> list[dict[str, Tensor]]:
    """Eight sequences of tokens from 3 to *words* + 2, each its own labels."""
    return [{"input_ids": row, "labels": row} for row in torch.arange(96).view(8, 12) * 7 % words + 3]


def trainer_of(
    folder: Any, model: Any, data: Sequence[Any], callbacks: Iterable[Any] = (), model_init: Any = None, **options: Any
) -> Trainer:
    """A `Trainer` for *model*; *options* are for `TrainingArguments`."""
    from transformers import Trainer, TrainingArguments

    return Trainer(
        model,
        TrainingArguments(str(folder), **{**OPTIONS, **options}),
        train_dataset=data,
        eval_dataset=data[:2],
        callbacks=list(callbacks),
        model_init=model_init,
    )


def losses(trainer: Trainer) -> Tensor:
    """The loss of every step that was logged."""
    return torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line])
