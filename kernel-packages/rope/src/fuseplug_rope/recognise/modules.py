"""Rotary modules: they hold their tables, and rotate the one tensor that they are given."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute, Example, Proposal, Rejection, Target
from fuseplug.reading import hazard

from ..reference import VARIANTS
from .function_calls import HALF_TYPES, normal, zeros

# No two sizes are alike, so that nothing fits another dimension by chance.
_BATCH, _TOKENS, _HEADS, _ROWS_BEYOND = 2, 5, 3, 2
_SMALL = 8
_LARGE = 1 << 10
"""The number of elements from which on an example has as many angles as the module."""


@dataclass(frozen=True)
class Tables:
    """The tables, ``(positions, angles)``, by name.

    Attributes:
        cos: The table of cosines; without *sin*, a table of complex numbers, or of pairs of a cosine and a sine.
        sin: The table of sines.
        pairs: Whether *cos* is a table of pairs.
    """

    cos: str
    sin: str | None = None
    pairs: bool = False

    def of(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Cosines and sines, ``(positions, angles)`` each."""
        table: Tensor = getattr(module, self.cos)
        if self.sin is not None:
            return table, getattr(module, self.sin)
        return (table[..., 0], table[..., 1]) if self.pairs else (table.real, table.imag)

    def sized(self, make: Callable[..., Tensor], rows: int, angles: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tables of other sizes, by name."""
        shape = (rows, angles, 2) if self.pairs else (rows, angles)
        return {name: make(shape, dtype) for name in (self.cos, self.sin) if name is not None}


@dataclass(frozen=True)
class ModuleAdapter(Adapter):
    """Rotates with the tables that the module holds at the time of the call.

    Attributes:
        variant: A key of `fuseplug_rope.reference.VARIANTS`.
        tables: Where the tables are.
        sequence: The dimension of tokens, before the heads or after them: -3 or -2.
    """

    variant: str
    tables: Tables
    sequence: Literal[-3, -2]

    @property
    def reads(self) -> tuple[str, ...]:
        """The tables."""
        return tuple(name for name in (self.tables.cos, self.tables.sin) if name is not None)

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, x)``, with positions after x if they are given.

        ``x`` is ``(batch, sequence, heads, head_dim)`` or ``(batch, heads, sequence, head_dim)``, as *sequence* says,
        floating, and so is the result; positions are ``(batch, sequence)`` integers. Errors are those of
        `reference.rope`.
        """
        tables, sequence, variant = self.tables, self.sequence, self.variant

        def forward(module: nn.Module, x: Tensor, *positions: Tensor | None) -> Any:
            ids = positions[0] if positions else None
            if x.dim() != 4 or (ids is not None and ids.dim() != 2):
                return NotImplemented
            cos, sin = tables.of(module)
            rows: Any = slice(x.shape[sequence]) if ids is None else ids
            cos, sin = cos[rows], sin[rows]
            if sequence == -3:
                cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
            elif ids is not None:
                cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            return compute(x, None, cos, sin, variant=variant)[0]

        return forward


class ModuleMix(NamedTuple):
    """One call to check: dtypes, and what is given as positions: nothing, ``None`` (``"none"``) or ``"ids"``."""

    x: torch.dtype
    table: torch.dtype
    positions: Literal["none", "ids"] | None = None


def match(module: nn.Module) -> list[Proposal] | Rejection | None:
    """Propose for *module* if it is a leaf with tables and without parameters, and returns a tensor shaped like x."""
    if module._modules or module._parameters or (tables := _tables(module)) is None:
        return None
    if (positions := _positions(type(module).forward)) is None:
        return None
    if why := hazard(module):
        return Rejection(why, kind="unlike")
    if (full := _is_full(module, tables)) is None:
        return None
    table = getattr(module, tables.cos)
    fitting = [
        name
        for name, variant in VARIANTS.items()
        if variant.width == "whole"
        and (variant.table != "half") is full
        and (variant.form == "complex") is table.is_complex()
    ]
    return [
        Proposal(
            target=Target(),
            adapters=tuple(
                ModuleAdapter(name, tables, sequence) for sequence, name in itertools.product(_SEQUENCES, fitting)
            ),
            example=functools.partial(_example, tables, int(table.shape[1]), full),
            mixes=tuple(_mixes(table.dtype, positions)),
        )
    ]


_SEQUENCES: tuple[Literal[-3, -2], ...] = (-3, -2)


def _tables(module: nn.Module) -> Tables | None:
    tables = {
        name: value
        for store in (module._buffers, vars(module))
        for name, value in store.items()
        if isinstance(value, Tensor) and value.dim() > 1
    }
    if len(tables) == 1:
        ((name, table),) = tables.items()
        if table.dim() == 3 and table.shape[-1] == 2 and table.is_floating_point():
            return Tables(name, pairs=True)
        return Tables(name) if table.dim() == 2 and table.is_complex() else None
    if len(tables) != 2 or len({table.shape for table in tables.values()}) > 1:
        return None
    cos, sin = (next((name for name in tables if word in name.lower()), None) for word in ("cos", "sin"))
    return Tables(cos, sin) if cos and sin and tables[cos].dim() == 2 else None


def _positions(forward: Callable[..., Any]) -> bool | None:
    """Whether *forward* takes positions after x; ``None`` if it takes no single tensor."""
    _, *parameters = inspect.signature(forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not named or any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters if p is not named[0]):
        return None
    return len(named) > 1 and "pos" in named[1].name


def _is_full(module: nn.Module, tables: Tables) -> bool | None:
    """Whether there is an angle for each element, not for each plane; ``None`` if *module* does not rotate.

    A call of a copy shows it: similar modules return their tables instead.
    """
    copy = object.__new__(type(module))
    dtype = getattr(module, tables.cos).dtype
    zeroed = tables.sized(zeros, _TOKENS + _ROWS_BEYOND, _SMALL, dtype)
    attributes = {name: zeroed[name] for name in zeroed if name in vars(module)}
    buffers = {"_buffers": module._buffers | {name: zeroed[name] for name in zeroed if name in module._buffers}}
    object.__setattr__(copy, "__dict__", vars(module) | attributes | buffers)
    for width in (2 * _SMALL, _SMALL):
        x = torch.zeros(_BATCH, _TOKENS, _HEADS, width, device="cpu")
        try:
            with torch.no_grad():
                result = copy.forward(x)
        except Exception:  # noqa: BLE001, S112 - a third party's forward may raise anything
            continue
        return width == _SMALL if isinstance(result, Tensor) and result.shape == x.shape else None
    return None


def _mixes(table: torch.dtype, positions: bool) -> Iterator[ModuleMix]:
    pairs = [(x, table if table.is_complex else x) for x in (torch.float32, *HALF_TYPES)]
    if not table.is_complex:
        pairs += [(x, torch.float32) for x in HALF_TYPES]
    pairs.sort(key=lambda pair: pair[1] is not table)
    for pair in pairs:
        yield ModuleMix(*pair)
    if positions:
        yield ModuleMix(*pairs[0], "none")
        yield ModuleMix(*pairs[0], "ids")


def _example(tables: Tables, angles: int, full: bool, mix: ModuleMix, size: int, generator: torch.Generator) -> Example:
    """Random rows and tables.

    Returns:
        x ``(batch, sequence, heads, head_dim)`` in its dtype; if *mix* gives positions, ``(batch, sequence)`` int64 or
        ``None``; and the tables, ``(positions, angles)``, in theirs.
    """
    angles = _SMALL if size < _LARGE else angles
    width = angles if full else 2 * angles
    tokens = max(_TOKENS, -(-size // (_BATCH * _HEADS * width)))
    rows = tokens + _ROWS_BEYOND
    make = functools.partial(normal, generator)
    args: list[Any] = [make((_BATCH, tokens, _HEADS, width), mix.x)]
    if mix.positions is not None:
        ids = torch.arange(_BATCH * tokens, device="cpu").view(_BATCH, tokens) * 3 % rows
        args.append(ids if mix.positions == "ids" else None)
    return Example(args, parameters=tables.sized(make, rows, angles, mix.table))
