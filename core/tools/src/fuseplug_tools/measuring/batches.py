"""The inputs on which a model runs to record its calls: the user's batches, or random tokens."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug.errors import PlanError

LENGTHS = (16, 128, 512, 2048)
"""Tokens of the random batches, from a short prompt to a long one. Decoding, one token at a time, is below all."""

GIVE = "give measure= one batch or several, the keyword arguments of a call of the model"

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Runs:
    """How a model is run to record its calls, and how the calls are timed.

    Attributes:
        batches: The batches on which the model is run.
        autocast: The dtype of autocast for each device type; ``None`` where autocast is off.
    """

    batches: Sequence[Batch]
    autocast: Mapping[str, torch.dtype | None] = field(default_factory=dict)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Turn autocast on as it was when the user asked, because a plan is made without autocast.

        Casts of weights are not kept: the user's autocast would use them later, and a step of training makes them once.
        """
        with contextlib.ExitStack() as stack:
            for device_type, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device_type, dtype, enabled=dtype is not None, cache_enabled=False))
            yield


def runs_of(model: nn.Module, measure: object) -> Runs:
    """The runs that *measure* asks for, under autocast if it is on now. For arguments and errors see `batches_of`."""
    device_types = dict.fromkeys(["cpu", *(parameter.device.type for parameter in model.parameters())])
    autocast = {
        device_type: torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        for device_type in device_types
        if torch.amp.is_autocast_available(device_type)
    }
    return Runs(batches_of(model, measure), autocast)


def batches_of(model: nn.Module, measure: object) -> list[Batch]:
    """The batches on which *measure* asks to run *model*.

    Args:
        model: The model.
        measure: ``True`` for random tokens; one batch, or a sequence of several.

    Raises:
        PlanError: If *measure* is something else, or *model* does not take random tokens.
    """
    if measure is True:
        return _random(model)
    if isinstance(measure, Mapping):
        return [measure]
    if isinstance(measure, Sequence) and measure and all(isinstance(batch, Mapping) for batch in measure):
        return list(measure)
    raise PlanError(f"measure={measure!r:.60} is no batch: {GIVE}, or True for random tokens")


def refuse_absent(model: nn.Module, device_type: str | None) -> None:
    """Raise if *model* cannot be run on the device that it is planned for.

    Args:
        model: The model.
        device_type: The device type that the user named; ``None`` for the one on which the model is.

    Raises:
        PlanError: If parts of the model are on meta, or on another device type.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise PlanError("measure= runs the model, and it is on meta: load or build its weights first")
    elsewhere = sorted({tensor.device.type for tensor in tensors} - {device_type})
    if device_type is not None and elsewhere:
        raise PlanError(
            f"measure= runs the model where it is, on {', '.join(elsewhere)}, and device= says {device_type}: move the "
            "model there first"
        )


def _random(model: nn.Module) -> list[Batch]:
    table = _embeddings(model)
    if table is None or "input_ids" not in inspect.signature(type(model).forward).parameters:
        raise PlanError(
            f"measure=True runs the model on random tokens, and {type(model).__name__} takes no input_ids or has no "
            f"input embeddings: {GIVE}"
        )
    words = table.shape[0]
    generator = torch.Generator().manual_seed(0)
    most = _most_positions(model)
    lengths = [length for length in LENGTHS if length <= most] or [most]
    return [
        {"input_ids": torch.randint(words, (1, length), generator=generator, device="cpu").to(table.device)}
        for length in lengths
    ]


def _embeddings(model: nn.Module) -> Tensor | None:
    """The weight of the model's input embeddings, if the model says which these are."""
    try:
        weight = model.get_input_embeddings().weight  # type: ignore[operator]  # a method of transformers' models
    except (AttributeError, NotImplementedError):
        return None
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _most_positions(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else LENGTHS[-1]
