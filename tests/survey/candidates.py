"""What a module may be called with, by the names of its parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import pictures, sound, text
from .part import Part

_MAKERS: Mapping[str, Callable[[Part], list[Any]]] = {**text.MAKERS, **pictures.MAKERS, **sound.MAKERS}
"""The values that a parameter of a name may be given, likely ones first; with None it is not given."""

_MAIN: tuple[tuple[str, ...], ...] = (
    ("input_ids", "pixel_values"),
    ("input_ids", "image_pixel_values"),
    ("input_ids", "input_features"),
    ("input_ids", "decoder_input_ids"),
    ("input_features", "decoder_input_ids"),
    ("flattened_patches", "decoder_input_ids"),
    ("input_ids",),
    ("pixel_values",),
    ("pixel_values_videos",),
    ("flattened_patches",),
    ("input_values",),
    ("input_features",),
    ("inputs_embeds",),
    ("hidden_states",),
)
"""What is given besides what must be, most first."""

_MANY = 40
"""Candidates for one choice of parameters."""


def candidates(part: Part) -> Iterator[dict[str, Any]]:
    """What *part* may be called with, likely ones first."""
    tried = set()
    for names in (*_MAIN, ()):
        chosen = tuple(dict.fromkeys((*part.required, *names)))
        if chosen and chosen not in tried and all(name in part.parameters for name in chosen):
            tried.add(chosen)
            yield from _given(part, chosen)


def _given(part: Part, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    along = [*(pictures.WITH if any("pixel" in n for n in names) else ())]
    along += sound.WITH if "input_features" in names else ()
    names = tuple(dict.fromkeys((*names, *(n for n in along if n in part.parameters))))
    first = next(iter(part.parameters))
    makers = [_MAKERS.get(name, text.vectors if name == first else None) for name in names]
    if not all(makers):
        return
    for values in itertools.islice(itertools.product(*(maker(part) for maker in makers)), _MANY):
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if "input_ids" in given and len(given) > 1 and "decoder_input_ids" not in given:
            with contextlib.suppress(Exception):
                yield given | text.with_places(part, given)
        yield given
