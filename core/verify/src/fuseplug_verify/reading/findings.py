"""The data that a reading finds."""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from torch import nn

Path: TypeAlias = tuple[str, ...]
"""Names below a module; ``"*"`` stands for each item of a list or dict of modules."""

Span: TypeAlias = tuple[int, int, int, int]
"""First line, first column, last line, last column: as in ``types.CodeType.co_positions``, in another order."""


class _Missing(enum.Enum):
    MISSING = "MISSING"


MISSING: Final = _Missing.MISSING
"""Stands for a value where there is none."""


@dataclass(frozen=True)
class CodePlace:
    """One place in the code that was read.

    Attributes:
        text: The code and where it is, for a person: ``"x[0] = 3 (line 12 of Llama.forward)"``.
        inside: The path of the called child whose forward contains it; ``()`` for the module itself.
        file: The file that it is in.
        span: First line, first column, last line, last column; ``None`` if no single place is meant.
        source: The code alone, as `ast.unparse` writes it.
    """

    text: str
    inside: Path = ()
    file: str = ""
    span: Span | None = None
    source: str = ""


@dataclass(frozen=True)
class Looked:
    """A name that is looked up outside the module: usually a global.

    Attributes:
        space: Where it is looked up: the globals of a function, the namespace of a module, object or class, a dict; or
            the closure cell that is read.
        name: The name.
        value: Its present value, or `MISSING`.
        inside: The path of the called child whose forward looks it up; ``()`` for the module itself.
        number: The ``id`` of *space*; or of its class, because each access to the namespace of a class makes an object.
    """

    space: Mapping[str, Any] | types.CellType = field(repr=False)
    name: str
    value: Any
    inside: Path
    number: int


@dataclass
class Reading:
    """Everything that a reading found.

    Attributes:
        reads: The chains of attributes below the module that are read, with what is there now, or `MISSING`. A property
            of a Python class is read like a function, so what it reads is listed in its place.
        calls: The modules below the module that are called; their forwards are read too.
        methods: The methods used, of the module and of what is below it, by the owner's path and the method's name.
        globals: Names that are looked up elsewhere, closure cells included, once for each child whose forward does so.
        side_effects: Changes of anything that was not made in the call. Writing into a tensor argument does not
            count, because running the function shows it.
        branches: Tests of what only examples can vary: shapes, values and memory of tensors, whether gradients are
            recorded, random numbers. Tests that only decide whether to raise are left out.
        clamps: Whether some magnitudes may be treated differently from others.
        draws: Whether random numbers may be drawn.
        sizes: Integers that shapes and values are compared with, or where slices begin and end.
        numbers: Numbers that are written in the code.
        unknown: What could not be read, and where.
        codes: The code objects that were read, nested ones too.
        ignored: The parameters of the function that its code never uses.
    """

    reads: dict[Path, Any] = field(default_factory=dict)
    calls: dict[Path, nn.Module] = field(default_factory=dict)
    methods: dict[tuple[Path, str], types.FunctionType] = field(default_factory=dict)
    globals: list[Looked] = field(default_factory=list)
    side_effects: list[CodePlace] = field(default_factory=list)
    branches: list[CodePlace] = field(default_factory=list)
    clamps: bool = False
    draws: bool = False
    sizes: set[int] = field(default_factory=set)
    numbers: set[float] = field(default_factory=set)
    unknown: list[CodePlace] = field(default_factory=list)
    codes: list[types.CodeType] = field(default_factory=list)
    ignored: frozenset[str] = frozenset()

    @property
    def unread(self) -> list[str]:
        """What could not be read, for a person."""
        return [place.text for place in self.unknown]
