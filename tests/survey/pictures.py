"""Two pictures in every form that models take: whole, in patches, in tiles, in frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .submodule import LENGTH, Submodule, noise

_GRID = 4
"""Patches along each side of a picture for models that take pictures of any size."""


def pictures(submodule: Submodule) -> list[Any]:
    """The pixels of two pictures, in every form."""
    side, channels = _side(submodule), _channels(submodule)
    patches = [(2 * _GRID**2, width) for width in _patch_widths(submodule)]
    padded = [(2, _GRID**2, width) for width in _patch_widths(submodule)]
    conv = submodule.first(nn.Conv2d, nn.Conv3d)
    small = [(2 * _GRID**2, *conv.weight.shape[1:]), (1, 2 * _GRID**2, *conv.weight.shape[1:])] if conv else []
    whole = [(2, channels, side, side), (2, 1, channels, side, side), (2, 1, 1, channels, side, side)]
    frames = [(2, 2, channels, side, side), (2, channels, 4, side, side)]
    tubes = [(2 * _GRID**2, 2, channels, *conv.weight.shape[-2:])] if conv else []
    square = [(2, channels, _GRID * patch, _GRID * patch) for patch in {_patch(submodule)} if _GRID * patch != side]
    shapes = [*whole, *patches, *padded, *small, *frames, *tubes, *square]
    if any("grid" in name for name in submodule.parameters):
        block = 2 * _patch(submodule)
        shapes = [*patches, *small, *tubes, *padded, *whole, (2 * _GRID**2 // 4, block, block, channels)]
    return [noise(*shape) for shape in shapes]


def film(submodule: Submodule) -> list[Any]:
    """The pixels of two films of a few frames."""
    side, channels = _side(submodule), _channels(submodule)
    frames = submodule.number("frames_per_clip", "num_frames", default=4)
    return [noise(2, frames, channels, side, side), noise(2, channels, frames, side, side)]


def flattened(submodule: Submodule) -> list[Any]:
    """Patches in rows, each of which begins with the patch's place in the picture."""
    where = torch.arange(2 * _GRID**2).view(2, -1, 1) % _GRID**2
    places = torch.cat([where // _GRID + 1, where % _GRID + 1], -1)
    return [torch.cat([places.float(), noise(2, _GRID**2, width)], -1) for width in _patch_widths(submodule)]


def _side(submodule: Submodule) -> int:
    return submodule.number("image_size", "img_size", "crop_size", default=32)


def _patch(submodule: Submodule) -> int:
    conv = submodule.first(nn.Conv2d, nn.Conv3d)
    return conv.kernel_size[-1] if conv else submodule.number("patch_size", "spatial_patch_size", default=8)


def _channels(submodule: Submodule) -> int:
    conv = submodule.first(nn.Conv2d, nn.Conv3d)
    return conv.in_channels if conv else submodule.number("num_channels", "in_channels", "in_chans", default=3)


def _patch_widths(submodule: Submodule) -> list[int]:
    """How many numbers a patch may have, according to the first layer in *submodule* that takes patches."""
    found = []
    for tower in submodule.named(_TOWERS):
        for module in tower.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                found.append(module.weight[0].numel())
            elif isinstance(module, nn.Linear):
                found.append(module.in_features)
            if found:
                break
    patch = submodule.number("patch_size", "spatial_patch_size", default=8)
    return list(dict.fromkeys([*found, 3 * patch**2]))


_TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embedder", "patch_embed")


def _grid(_: Submodule) -> list[Any]:
    return [torch.tensor([[1, side, side]] * 2) for side in (_GRID, _GRID // 2)]


def _sizes(submodule: Submodule) -> list[Any]:
    side = _side(submodule)
    return [torch.tensor([[side, side]] * 2), torch.tensor([[_GRID * _patch(submodule)] * 2] * 2)]


def _places(_: Submodule) -> list[Any]:
    where = torch.arange(_GRID**2)
    return [torch.stack([where % _GRID, where // _GRID], -1).expand(2, -1, -1).contiguous()]


def _pixel_masks(submodule: Submodule) -> list[Any]:
    side = _side(submodule)
    shapes = ((2, _GRID**2), (2, 1, side, side), (2, side, side), (2, 1))
    return [None, *(torch.ones(shape, dtype=torch.long) for shape in shapes)]


def _each(value: Any) -> Callable[[Submodule], list[Any]]:
    return lambda _: [value]


def _tensor(*numbers: Any) -> Callable[[Submodule], list[Any]]:
    return lambda _: [torch.tensor(numbers)]


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


MAKERS: Mapping[str, Callable[[Submodule], list[Any]]] = {
    "pixel_values": pictures,
    "image_pixel_values": pictures,
    "pixel_values_images": pictures,
    "high_res_pixel_values": lambda submodule: [noise(2, 3, side, side) for side in {_side(submodule), 64, 1024}],
    "pixel_values_videos": film,
    "flattened_patches": flattened,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "video_grid_thw": _grid,
    "grid_hws": _tensor([_GRID] * 2, [_GRID] * 2),
    "image_grid_hws": _tensor([_GRID] * 2, [_GRID] * 2),
    "spatial_shapes": _tensor([_GRID] * 2, [_GRID] * 2),
    "target_sizes": _tensor([_GRID] * 2, [_GRID] * 2),
    "merge_sizes": _tensor(2, 2),
    "image_merge_sizes": _tensor(2, 2),
    "image_sizes": _sizes,
    "pixel_position_ids": _places,
    "image_position_ids": _places,
    "pixel_attention_mask": _pixel_masks,
    "image_attention_mask": lambda _: [_ones(2, LENGTH, 1), None],
    "aspect_ratio_ids": lambda _: [_ones(2, 1)],
    "aspect_ratio_mask": lambda submodule: [_ones(2, 1, submodule.number("max_num_tiles", default=4))],
}

WITH = (
    "grid_thw",
    "image_grid_thw",
    "grid_hws",
    "image_grid_hws",
    "spatial_shapes",
    "target_sizes",
    "merge_sizes",
    "image_merge_sizes",
    "image_sizes",
    "pixel_position_ids",
    "image_position_ids",
    "pixel_attention_mask",
    "high_res_pixel_values",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
    "image_attention_mask",
)
"""The inputs that accompany pictures, if a model takes them."""
