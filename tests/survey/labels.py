"""All calls of a model, including a training call with labels, from which it computes a loss."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from .candidates import Inputs
from .feeding import Call, calls_for, outputs
from .submodule import LENGTH


def all_calls(model: nn.Module, paths: Collection[str]) -> list[Call]:
    """The calls of *model* that `calls_for` finds, and a training call if it computes a loss from labels.

    Raises:
        RuntimeError: As `calls_for`.
    """
    calls = calls_for(model, paths)
    training = _training_call(model, calls)
    return calls if training is None else [*calls, training]


def _training_call(model: nn.Module, calls: Sequence[Call]) -> Call | None:
    """The first of *calls* that, with labels, gives a loss with a gradient; ``None`` if there is none."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    for inputs in (given for call in calls if not call.path for given in labelled(call.inputs)):
        call = Call("", inputs, loss=True)
        try:
            (loss,) = outputs(model, call)[0].values()
        except Exception:  # another way may work; calls without labels are compared in any case
            continue
        if loss.isfinite():
            return call
    return None


def labelled(inputs: Inputs) -> Iterator[Inputs]:
    """*inputs* with labels, as data collators give them: for a decoder, first in place of its own input."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    tokens = given.get("decoder_input_ids", given.get("input_ids"))
    alone = {name: value for name, value in given.items() if name != "decoder_input_ids"}
    if tokens is None or tokens.is_floating_point():
        tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % 9 + 3
    ignoring = tokens.clone().long()
    ignoring[0, :2] = -100
    for labels in (ignoring, tokens.clone().long()):
        yield alone | {"labels": labels}
        if "decoder_input_ids" in given:
            yield given | {"labels": labels}
