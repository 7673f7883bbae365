"""The inputs with which a module may be called, by the names of its parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import pictures, rare_inputs, sound, text
from .submodule import Submodule

_MAKERS: Mapping[str, Callable[[Submodule], list[Any]]] = {
    **text.MAKERS,
    **pictures.MAKERS,
    **sound.MAKERS,
    **rare_inputs.MAKERS,
}
"""The values for a parameter of each name, likely ones first; ``None`` leaves it out unless it is required."""

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
"""The choices of parameters to give besides the required ones, several parameters before one."""

_MANY = 40
"""The most candidates for one choice of parameters."""

Inputs = dict[str, Any]


def candidates(submodule: Submodule) -> Iterator[Iterator[Inputs]]:
    """Inputs for *submodule*: for each choice of parameters, in the order of `_MAIN`, values, likely ones first."""
    tried = set()
    for names in (*_MAIN, ()):
        chosen = _completed(submodule, names)
        if chosen and chosen not in tried and all(name in submodule.parameters for name in chosen):
            tried.add(chosen)
            yield _given(submodule, chosen)


def _completed(submodule: Submodule, names: tuple[str, ...]) -> tuple[str, ...]:
    """The required parameters, *names*, and the parameters that accompany them."""
    names = (*submodule.required, *names)
    along = [*(pictures.WITH if any("pixel" in n for n in names) else ())]
    along += sound.WITH if "input_features" in names else ()
    along += rare_inputs.WITH
    return tuple(dict.fromkeys((*names, *(n for n in along if names and n in submodule.parameters))))


def _given(submodule: Submodule, names: tuple[str, ...]) -> Iterator[Inputs]:
    first = next(iter(submodule.parameters))
    makers = [_MAKERS.get(name, text.vectors if name == first else None) for name in names]
    if not all(makers):
        return
    for values in itertools.islice(_likely_first([maker(submodule) for maker in makers]), _MANY):
        pairs = zip(names, values, strict=True)
        given = {name: value for name, value in pairs if value is not None or name in submodule.required}
        if "input_ids" in given and any(name.startswith(("pixel", "input_features")) for name in given):
            with contextlib.suppress(Exception):
                yield given | text.with_places(submodule, given)
        yield given


def _likely_first(choices: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Every way to take one value from each of *choices*, in order of how far down the values are in their choices."""
    orders = itertools.product(*(range(len(choice)) for choice in choices))
    for order in sorted(orders, key=sum):
        yield tuple(choice[n] for choice, n in zip(choices, order, strict=True))
