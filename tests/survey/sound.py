"""Two sounds in every form that models take: waves, or spectra with the bins before or behind the frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .submodule import Submodule, noise

_SAMPLES = 2000
_LONGEST = 1500


def waves(submodule: Submodule) -> list[Any]:
    """Two waves."""
    return [noise(*shape, _SAMPLES) for shape in ((2,), (2, 1))]


def spectra(submodule: Submodule) -> list[Any]:
    """Two spectra."""
    bins = _bins(submodule)
    frames = list(dict.fromkeys([64, *_frames(submodule)]))
    shapes = [shape for n in bins for f in frames for shape in ((2, n, f), (2, f, n))]
    return [noise(*shape) for shape in shapes]


def _bins(submodule: Submodule) -> list[int]:
    named = submodule.number(
        "feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "feature_size", default=80
    )
    found = [named]
    for tower in submodule.named(_TOWERS):
        first = next((m for m in tower.modules() if isinstance(m, nn.Conv1d | nn.Linear | nn.LayerNorm)), None)
        if isinstance(first, nn.Conv1d):
            found.append(first.in_channels)
        elif first is not None:
            found.append(first.weight.shape[-1])
    return list(dict.fromkeys([*found, 80, 128]))


def _frames(submodule: Submodule) -> list[int]:
    """The numbers of frames that an encoder with a position for each frame takes."""
    places = submodule.number("max_source_positions", default=0)
    return [2 * places, places] if 0 < places <= _LONGEST else []


_TOWERS = ("audio_tower", "audio_encoder", "audio_model", "encoder", "speech_encoder")


def _masks(submodule: Submodule) -> list[Any]:
    return [None, *(torch.ones(2, n, dtype=torch.long) for n in dict.fromkeys([64, *_frames(submodule)]))]


MAKERS: Mapping[str, Callable[[Submodule], list[Any]]] = {
    "input_values": waves,
    "input_features": spectra,
    "audio_mel": spectra,
    "input_features_mask": _masks,
    "feature_attention_mask": _masks,
    "audio_mel_mask": lambda _: [torch.zeros(2, 64, dtype=torch.bool)],
    "audio_feature_lengths": lambda _: [None, torch.tensor([64, 64])],
}

WITH = ("input_features_mask", "feature_attention_mask", "audio_feature_lengths")
"""The inputs that accompany spectra, if a model takes them."""
