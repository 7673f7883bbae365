"""What a model is called with: tokens, pictures or sound, as its signature asks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Any]

_TOKENS, _AUDIO, _FRAMES = 12, 2000, 64
_ORDER = (
    ("input_ids",),
    ("input_ids", "decoder_input_ids"),
    ("pixel_values",),
    ("input_ids", "pixel_values"),
    ("input_values",),
    ("input_features",),
    ("input_features", "decoder_input_ids"),
    ("inputs_embeds",),
    ("hidden_states",),
)


def inputs_for(model: nn.Module) -> Inputs:
    """The first inputs that *model* runs with and gives something differentiable for.

    Raises:
        RuntimeError: If there are none, with what was said of each try.
    """
    said = []
    for inputs in candidates(model):
        try:
            if outputs(model, inputs):
                return inputs
            said.append(f"{', '.join(inputs)}: nothing differentiable")
        except Exception as error:
            said.append(f"{', '.join(inputs)}: {type(error).__name__}: {str(error)[:160]}")
    raise RuntimeError(" | ".join(said))


def candidates(model: nn.Module) -> Iterator[Inputs]:
    """What *model* may be called with, likely ones first."""
    parameters = inspect.signature(model.forward).parameters
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    tried = set()
    for names in ((), *_ORDER):
        chosen = tuple(dict.fromkeys((*required, *names)))
        if chosen and chosen not in tried and all(name in parameters for name in chosen):
            tried.add(chosen)
            if all(name in _MAKERS for name in chosen):
                yield {name: _MAKERS[name](model) for name in chosen}


def outputs(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """What *model* gives for *inputs*, the same each time: every tensor that a gradient can come from, by name."""
    torch.manual_seed(0)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    given = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    return {name: value for name, value in _tensors(model(**given)) if value.requires_grad}


def step(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """One forward and backward: what came out, and the gradient of each parameter that has one, by name."""
    model.zero_grad(set_to_none=True)
    found = outputs(model, inputs)
    generator = torch.Generator().manual_seed(1)
    upstream = [
        torch.randn(y.shape, generator=generator).to(y.dtype) / max(1, y.numel()) ** 0.5 for y in found.values()
    ]
    torch.autograd.backward(list(found.values()), upstream)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {name: y.detach().clone() for name, y in found.items()} | gradients


def _tensors(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors(each, f"{name}[{number}]")


def _number(model: nn.Module, *names: str, default: int) -> int:
    """The first of *names* that the config of *model*, or one below it, holds."""
    config = model.config
    for each in (config, *(getattr(config, n, None) for n in ("vision_config", "text_config", "audio_config"))):
        for name in names:
            value = getattr(each, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def _tokens(model: nn.Module) -> Tensor:
    return torch.arange(2 * _TOKENS).view(2, _TOKENS) * 7 % 40 + 210


def _picture(model: nn.Module) -> Tensor:
    side = _number(model, "image_size", "img_size", default=32)
    channels = _number(model, "num_channels", "in_channels", "in_chans", default=3)
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def _sound(model: nn.Module) -> Tensor:
    return torch.randn(2, _AUDIO, generator=torch.Generator().manual_seed(0))


def _spectrum(model: nn.Module) -> Tensor:
    bins = _number(model, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    return torch.randn(2, bins, _FRAMES, generator=torch.Generator().manual_seed(0))


def _embedded(model: nn.Module) -> Tensor:
    width = _number(model, "hidden_size", "d_model", "embed_dim", default=64)
    return torch.randn(2, _TOKENS, width, generator=torch.Generator().manual_seed(0))


_MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _picture,
    "input_values": _sound,
    "input_features": _spectrum,
    "inputs_embeds": _embedded,
    "hidden_states": _embedded,
}
