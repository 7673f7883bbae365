"""The work at which a model is timed: a training step, the prefill of a prompt, the decoding of a token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..measuring.calls import wait_for

if TYPE_CHECKING:
    from torch import nn

Run = Callable[[], Any]


def train(model: nn.Module, ids: Tensor) -> Run:
    """Forward and backward with labels; the optimizer is not part of it."""
    model.train()

    def run() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        wait_for(ids)

    return run


def prefill(model: nn.Module, ids: Tensor) -> Run:
    """The forward of a prompt, with the logits of its last token if the model can leave out the others."""
    model.eval()
    last = {"logits_to_keep": 1} if "logits_to_keep" in _parameters(model) else {}

    def run() -> None:
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **last)
        wait_for(ids)

    return run


def decode(model: nn.Module, ids: Tensor) -> Run:
    """The forward of one more token after *ids*. The cache grows by one token with each call."""
    model.eval()
    name, token = _cache_name(model), ids[:, -1:]
    with torch.no_grad():
        cache = getattr(model(input_ids=ids, use_cache=True), name)

    def run() -> None:
        nonlocal cache
        with torch.no_grad():
            cache = getattr(model(input_ids=token, use_cache=True, **{name: cache}), name)
        wait_for(ids)

    return run


MODES: dict[str, Callable[[nn.Module, Tensor], Run]] = {"train": train, "prefill": prefill, "decode": decode}


def cannot_work(model: nn.Module) -> str:
    """Why *model* cannot do the work that is timed here; ``""`` if it can."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "with an encoder of its own"
    lacking = sorted({"input_ids", "labels", "use_cache", _cache_name(model)}.difference(_parameters(model)))
    return f"whose forward takes no {' and no '.join(lacking)}" if lacking else ""


def tokens_for(model: nn.Module, count: int) -> Tensor:
    """One row of *count* tokens, always the same."""
    words = model.get_input_embeddings().num_embeddings  # type: ignore[operator]  # a method of transformers' models
    ids = torch.randint(words, (1, count), generator=torch.Generator().manual_seed(0), device="cpu")
    return ids.to(next(model.parameters()).device)


def _cache_name(model: nn.Module) -> str:
    """The name of the cache that *model* takes and returns. transformers 5.24 renamed it."""
    return "past_key_values" if "past_key_values" in _parameters(model) else "cache"


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of the forward of *model*, without the wrapper of torch.compile."""
    return inspect.signature(getattr(model, "_orig_mod", model).__class__.forward).parameters
