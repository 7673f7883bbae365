"""Inputs that only a few models take: time series, the state of a robot, frames of a film and of what came before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .submodule import LENGTH, Submodule, noise
from .text import counted


def _series(submodule: Submodule) -> list[Any]:
    length = 4 * submodule.number("patch_length", default=16)
    return [noise(2, length), list(noise(2, length))]


def _rotation(submodule: Submodule) -> list[Any]:
    """Cosines and sines, one row for each vector."""
    width = submodule.number("head_dim", default=16)
    angles = noise(LENGTH, width // 2)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return [(cos.expand(2, -1, -1), sin.expand(2, -1, -1)), (cos, sin)]


def _seen(submodule: Submodule) -> list[Any]:
    """The features of two frames, place by place."""
    return [noise(_places(submodule, "position_ids"), 2, submodule.width)]


def _remembered(submodule: Submodule) -> list[Any]:
    """The features of earlier frames, in the widths that the attention of *submodule* takes."""
    keys = [m for name, m in submodule.module.named_modules() if name.endswith("k_proj") and isinstance(m, nn.Linear)]
    places = _places(submodule, "position_ids_k", "position_ids")
    return [noise(places, 2, width) for width in dict.fromkeys(k.in_features for k in reversed(keys))]


def _places(submodule: Submodule, *names: str) -> int:
    """The number of places for which *submodule* has positions."""
    return next((max(getattr(submodule.module, name).shape) for name in names if hasattr(submodule.module, name)), 16)


def _as_wide_as(name: str, *shape: int) -> Callable[[Submodule], list[Any]]:
    """Makes vectors for the first linear layer in or below a module called *name*."""

    def make(submodule: Submodule) -> list[Any]:
        found = [m for path, m in submodule.module.named_modules() if name in path.split(".")]
        layers = [m for m in found if isinstance(m, nn.Linear)]
        return [noise(*shape, layer.in_features) for layer in layers[:1]]

    return make


def _numbered(*names: str, default: int) -> Callable[[Submodule], list[Any]]:
    return lambda submodule: [noise(2, submodule.number(*names, default=default))]


def _zeros(*shape: int) -> Callable[[Submodule], list[Any]]:
    return lambda _: [torch.zeros(shape, dtype=torch.long)]


def _whole(*numbers: Any) -> Callable[[Submodule], list[Any]]:
    return lambda _: [torch.tensor(numbers)]


_PATCHES = "patch_embedding_projection"


def _audio_tokens(submodule: Submodule) -> list[Tensor]:
    return [counted(2, LENGTH, submodule.number("n_mel_bins", "num_mel_bins", "num_codebooks", default=8)) % 9]


MAKERS: Mapping[str, Callable[[Submodule], list[Any]]] = {
    "past_values": _series,
    "past_values_padding": lambda submodule: [torch.zeros_like(_series(submodule)[0], dtype=torch.long)],
    "freq": _zeros(2, 1),
    "position_embeddings": _rotation,
    "rotary_pos_emb": _rotation,
    "current_vision_features": _seen,
    "current_vision_position_embeddings": _seen,
    "memory": _remembered,
    "memory_posision_embeddings": _remembered,
    "num_spatial_memory_tokens": lambda _: [1],
    "state": _numbered("max_state_dim", default=32),
    "noise_embeds": lambda submodule: [noise(2, 4, submodule.width)],
    "context_hidden_states": _as_wide_as("encoder", 2, LENGTH),
    "image_features": lambda submodule: [noise(2, 16, submodule.width)],
    "pooled_patches_idx": lambda _: [counted(8, 4)],
    "marks": _whole([2, 5]),
    "num_options": _whole([2, 2]),
    "question_type_ids": _zeros(1, 2),
    "audio_input_ids": _audio_tokens,
    "use_cache": lambda _: [False],
    "num_delay_tokens": lambda _: [2],
    "t_cond": lambda submodule: [noise(1, submodule.number("hidden_size", default=64))],
    "num_patches": lambda _: [LENGTH // 2],
    "patch_ids": lambda _: [counted(2, LENGTH) % LENGTH // 2],
    "patch_embeds": lambda submodule: [
        noise(2, LENGTH // 2, submodule.width),
        *_as_wide_as(_PATCHES, 2, LENGTH // 2)(submodule),
    ],
    "condition_vector": lambda submodule: [noise(2, LENGTH, submodule.number("mel_dim", default=80))],
    "speaker_embedding": lambda submodule: [noise(2, LENGTH, submodule.number("enc_emb_dim", default=64))],
    "time_step": lambda _: [noise(2).abs()],
    "quantized_code": lambda _: [counted(2, LENGTH // 2)],
}

WITH = (
    "use_cache",
    "num_delay_tokens",
    "current_vision_position_embeddings",
    "memory_posision_embeddings",
    "num_spatial_memory_tokens",
    "position_embeddings",
    "rotary_pos_emb",
    "t_cond",
)
"""The inputs that accompany any others, if a model takes them."""
