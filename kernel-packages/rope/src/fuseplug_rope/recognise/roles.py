"""Which parameter of a rotary function is what: read from its signature, the only place where names count."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuseplug import Rejection
from fuseplug.reading import remembered

_MOST_ROTATED = 3
"""q, k, and in one model v."""


@dataclass(frozen=True)
class Roles:
    """The positions of a rotary function's parameters, by what the parameters are.

    Attributes:
        rotated: The tensors to rotate, one to three.
        cos: The table of cosines; ``None`` where one table holds both.
        sin: The table of sines.
        frequencies: The table of complex numbers.
        pairs: The table of pairs of a cosine and a sine.
        positions: The position of each token, whether the function looks at it or not.
        sections: How many angles belong to each axis of multimodal positions.
        unsqueeze: The dimension that the tables lack.
        defaults: For each parameter, its default; ``None`` without one.
        required: How many parameters must be given.
    """

    rotated: tuple[int, ...]
    cos: int | None = None
    sin: int | None = None
    frequencies: int | None = None
    pairs: int | None = None
    positions: int | None = None
    sections: int | None = None
    unsqueeze: int | None = None
    defaults: tuple[Any, ...] = ()
    required: int = 0


def is_rotary(value: object) -> bool:
    """Whether *value* looks like a rotary function: it takes cos and sin, or is named rotary and takes angles."""
    function = plain_function(value)
    if function is None:
        return isinstance(value, torch.jit.ScriptFunction) and _is_called_rotary(str(value.name))
    names = parameter_names(function)
    if any(map(_is_cos, names)) and any(map(_is_sin, names)):
        return True
    return _is_called_rotary(function.__name__) and any(
        _is_frequencies(name) or _is_pairs(name) or name in ("args", "kwargs") for name in names
    )


def _is_called_rotary(name: str) -> bool:
    return "rotary" in name.lower() or "rope" in name.lower()


def plain_function(value: object) -> types.FunctionType | None:
    """The Python function behind *value*.

    With the ``kernels`` library installed, transformers puts a module in the place of a rotary function. The module's
    forward calls the function from its closure.
    """
    if isinstance(value, types.FunctionType):
        return value
    if isinstance(value, nn.Module):
        cells = getattr(type(value).forward, "__closure__", None) or ()
        functions = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, types.FunctionType)]
        return functions[0] if len(functions) == 1 else None
    return None


@remembered
def parameter_names(function: types.FunctionType) -> tuple[str, ...]:
    """The names of all parameters, seen through decorators."""
    code: types.CodeType = inspect.unwrap(function).__code__
    count = code.co_argcount + code.co_kwonlyargcount
    variable = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: count + variable]


def roles_of(function: types.FunctionType) -> Roles | Rejection:
    """Read the roles from the signature of *function*, or say why they cannot be."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    roles: dict[str, int] = {}
    rotated: list[int] = []
    for position, parameter in enumerate(named):
        role = _role(parameter)
        if role is None and not roles and len(rotated) < _MOST_ROTATED:
            rotated.append(position)
        elif role is None or role in roles:
            return _unknown(function, f"what {parameter.name!r} is for is not known")
        else:
            roles[role] = position
    for parameter in parameters:
        # Keyword arguments beyond the named ones go to the original, whatever they are.
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY):
            return _unknown(function, f"{parameter} cannot be given by position")
    if not rotated or not ({"cos", "sin"} <= roles.keys() or {"frequencies", "pairs"} & roles.keys()):
        return _unknown(function, "q and k, or one tensor, then cos and sin, are expected")
    return Roles(
        tuple(rotated),
        **roles,
        defaults=tuple(None if p.default is p.empty else p.default for p in named),
        required=sum(p.default is p.empty for p in named),
    )


def _role(parameter: inspect.Parameter) -> str | None:
    return next((role for role, fits in _ROLES if fits(parameter.name)), None)


def _is_cos(name: str) -> bool:
    return name.lower() in ("cos", "cos_cached", "cosine", "freqs_cos", "cos_emb")


def _is_sin(name: str) -> bool:
    return name.lower() in ("sin", "sin_cached", "sine", "freqs_sin", "sin_emb")


def _is_frequencies(name: str) -> bool:
    return name.lower().startswith("freq") and not _is_cos(name) and not _is_sin(name)


def _is_pairs(name: str) -> bool:
    return name.lower() in ("rope_cache", "rotary_cache", "cos_sin", "cos_sin_cache")


_ROLES: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("cos", _is_cos),
    ("sin", _is_sin),
    ("frequencies", _is_frequencies),
    ("pairs", _is_pairs),
    ("positions", lambda name: "position" in name or name == "pos_ids"),
    ("sections", lambda name: "section" in name),
    ("unsqueeze", lambda name: "unsqueeze" in name or name == "dim"),
)


def _unknown(function: types.FunctionType, why: str) -> Rejection:
    names = ", ".join(inspect.signature(function).parameters)
    return Rejection(f"{function.__name__}({names}) is a rotary function of an unknown signature: {why}")


def is_rotary_name(name: str) -> bool:
    """Whether a method of this *name* applies a rotary embedding."""
    return "apply" in name and _is_called_rotary(name)
