"""Two rows of tokens, with places for pictures and sounds among them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .pictures import pictures
from .submodule import LENGTH, Submodule, noise


def tokens(submodule: Submodule) -> list[Any]:
    """Two rows of tokens; for several codebooks, also with an axis of codebooks behind or before the tokens."""
    numbers = counted(2, LENGTH)
    books = submodule.number("num_codebooks", "num_channels", "audio_channels", default=0)
    many = [counted(2, LENGTH, books) % 9 + 3] if books else []
    return [numbers * 7 % 40 + 210, numbers % 9, *many, *(m.transpose(1, 2).contiguous() for m in many), numbers[:, :4]]


def counted(*shape: int) -> Tensor:
    """Whole numbers from 0 on."""
    return torch.arange(math.prod(shape)).view(shape)


def vectors(submodule: Submodule) -> list[Any]:
    """Vectors: in two rows, in a single row, and in two squares."""
    named = (submodule.number(name, default=64) for name in ("hidden_size", "d_model", "embed_dim", "mel_dim"))
    widths = dict.fromkeys([submodule.width, *named])
    return [noise(*shape, width) for width in widths for shape in ((2, LENGTH), (2 * LENGTH,), (2, 4, 4))]


def with_places(submodule: Submodule, given: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens for *given* pictures or sounds, with a placeholder for each vector that the model makes of them.

    If the model has no placeholder, there are as many ordinary tokens as vectors.

    Raises:
        LookupError: If the model does not tell how many vectors it makes.
    """
    kind, vectors_of = next(_features(submodule, given), (None, None))
    if kind is None:
        raise LookupError("no method of the model returns only the vectors of pictures or sounds")
    asked = inspect.signature(vectors_of).parameters
    with torch.no_grad():
        found = vectors_of(**{name: value for name, value in given.items() if name in asked})
    count = sum(each.numel() // each.shape[-1] for each in _flat(found))
    place = _ids(submodule, kind, "")
    if place:
        start, end = (_ids(submodule, kind, which) for which in ("start", "end"))
        row = [211, 217, *start, *place * (count // 2), *end, 213, 219, 223]
    else:
        row = [211 + n % 9 for n in range(count // 2)]
    ids = torch.tensor([row, row])
    types = torch.isin(ids, torch.tensor(place)).long()
    return {
        name: value
        for name, value in {"input_ids": ids, "mm_token_type_ids": types, "token_type_ids": types}.items()
        if name in submodule.parameters
    }


def _features(submodule: Submodule, given: Mapping[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    kind = "image" if any("pixel" in name for name in given) else "audio"
    for module in submodule.module.modules():
        method = getattr(module, f"get_{kind}_features", None)
        if method is not None:
            yield kind, method


def _flat(found: Any) -> list[Tensor]:
    """The vectors in a model's result for pictures or sounds, however the model wraps them."""
    pooled = getattr(found, "pooler_output", None)
    if pooled is None:
        pooled = getattr(found, "last_hidden_state", None)
    if pooled is not None:
        return _flat(pooled)
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, tuple) and found and isinstance(found[0], list | tuple):
        return _flat(found[0])
    if isinstance(found, tuple) and found and found[0].dim() == 2 and len(found) > 1 and isinstance(found[1], list):
        return _flat(found[0])
    return [tensor for each in found for tensor in _flat(each)]


_NAMES = {
    "image": r"(image|img|media|vision)_?(context_|placeholder_|patch_)?",
    "audio": r"(audio|speech|sound)_?(context_|placeholder_)?",
}
_START = {"image": r"(vision_start|image_start|boi|image_begin)_", "audio": r"(audio_start|boa|audio_begin)_"}
_END = {"image": r"(vision_end|image_end|eoi)_", "audio": r"(audio_end|eoa)_"}


def _ids(submodule: Submodule, kind: str, which: str) -> list[int]:
    """The id of the token that stands for a piece of *kind*, or that begins or ends one; empty if there is none."""
    name = {"": _NAMES, "start": _START, "end": _END}[which][kind]
    pattern = re.compile(rf"{name}token_(id|index)")
    for config in submodule.configs:
        for key, value in vars(config).items():
            if pattern.fullmatch(key) and isinstance(value, int):
                return [value]
    return []


def _hidden(submodule: Submodule) -> list[Any]:
    """Vectors; if a grid goes with them, first the patches of pictures."""
    return [*(pictures(submodule) if any("grid" in name for name in submodule.parameters) else ()), *vectors(submodule)]


def _mask(_: Submodule) -> list[Any]:
    return [torch.ones(2, LENGTH, dtype=torch.long)]


MAKERS: Mapping[str, Callable[[Submodule], list[Any]]] = {
    "input_ids": tokens,
    "decoder_input_ids": tokens,
    "inputs_embeds": vectors,
    "encoder_hidden_states": vectors,
    "last_hidden_state": lambda submodule: [
        *vectors(submodule),
        noise(2, 4, submodule.number("input_size", "hidden_size", default=64)),
    ],
    "hidden_states": _hidden,
    "attention_mask": lambda submodule: [None, *_mask(submodule)],
    "padding_mask": lambda _: [None],
    "position_ids": lambda _: [torch.arange(LENGTH).expand(2, -1)],
}
