"""What a module may be called with, by the names of its parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import odds, pictures, sound, text
from .part import Part

_MAKERS: Mapping[str, Callable[[Part], list[Any]]] = {**text.MAKERS, **pictures.MAKERS, **sound.MAKERS, **odds.MAKERS}
"""What a parameter of a name may be given, likely values first; with None it is not given unless it must be."""

_MAIN: tuple[tuple[str, ...], ...] = (
    ("input_ids", "pixel_values"),
    ("input_ids", "image_pixel_values"),
    ("input_ids", "input_features"),
    ("input_ids", "decoder_input_ids"),
    ("input_features", "decoder_input_ids"),
    ("input_values", "decoder_input_ids"),
    ("flattened_patches", "decoder_input_ids"),
    ("input_ids", "encoder_hidden_states"),
    ("input_ids", "last_hidden_state"),
    ("input_ids", "inputs_embeds", "patch_embeds"),
    ("input_ids", "inputs_embeds", "patch_ids", "num_patches"),
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

Inputs = dict[str, Any]


def candidates(part: Part) -> Iterator[Iterator[Inputs]]:
    """What *part* may be called with: for each choice of parameters, most first, values for them, likely ones first."""
    tried = set()
    for names in (*_MAIN, ()):
        chosen = _completed(part, names)
        if chosen and chosen not in tried and all(name in part.parameters for name in chosen):
            tried.add(chosen)
            yield _given(part, chosen)


def _completed(part: Part, names: tuple[str, ...]) -> tuple[str, ...]:
    """*names*, what must be given besides, and what goes along with them."""
    names = (*part.required, *names)
    along = [*(pictures.WITH if any("pixel" in n for n in names) else ())]
    along += sound.WITH if "input_features" in names else ()
    along += odds.WITH
    return tuple(dict.fromkeys((*names, *(n for n in along if names and n in part.parameters))))


def _given(part: Part, names: tuple[str, ...]) -> Iterator[Inputs]:
    first = next(iter(part.parameters))
    makers = [_MAKERS.get(name, text.vectors if name == first else None) for name in names]
    if not all(makers):
        return
    for values in itertools.islice(_likely_first([maker(part) for maker in makers]), _MANY):
        pairs = zip(names, values, strict=True)
        given = {name: value for name, value in pairs if value is not None or name in part.required}
        if "input_ids" in given and any(name.startswith(("pixel", "input_features")) for name in given):
            with contextlib.suppress(Exception):
                yield given | text.with_places(part, given)
        yield given


def _likely_first(choices: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Every way to take one of each of *choices*, those first that take the first of most."""
    orders = itertools.product(*(range(len(choice)) for choice in choices))
    for order in sorted(orders, key=sum):
        yield tuple(choice[n] for choice, n in zip(choices, order, strict=True))
