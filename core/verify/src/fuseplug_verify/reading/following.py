"""What the parts of the reader ask of each other: expressions hold calls, and a call is followed into expressions."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Protocol

from .arguments import Arguments
from .found import Finding, Path, Reading
from .values import Value


class Following(Protocol):
    """What follows code from function to function, and keeps what is found: `fuseplug_verify.reading.reader.Reader`.

    Attributes:
        found: What is found.
        inside: The path of the module whose forward is read.
        walking: The local functions that are being read, so that recursion ends.
    """

    found: Reading
    inside: Path
    walking: list[Any]

    def note(self, store: list[Finding], text: str, kinds: Any, code: Any, span: Any, source: str = "") -> None:
        """Keep a finding, once."""

    def named(self, function: types.FunctionType) -> str:
        """*function*, for a person: with its Python module, if it is of another package than what is read."""

    def unread(self, _: Any, text: str, code: Any) -> None:
        """Keep what could not be read."""

    def looked(self, space: Mapping[str, Any], name: str, value: Any, owner: Any = None) -> None:
        """Keep a name that was looked up outside the module."""

    def held(self, cell: types.CellType, name: str, value: Any) -> None:
        """Keep a cell that was read."""

    def function(self, function: types.FunctionType, given: Arguments) -> Value:
        """Follow a call of *function*, and return what it returns."""

    def module(self, value: Value, given: Arguments) -> Value:
        """Follow a call of a module."""


class Walking(Protocol):
    """What walks through the code of one function, as calls of builtins and libraries see it.

    Attributes:
        reader: What it walks for.
    """

    reader: Following

    def where(self, node: Any) -> str:
        """Where *node* is, for a person."""

    def note(self, store: list[Finding], node: Any, kinds: Any = (), why: str = "") -> None:
        """Keep *node* as a finding."""

    def unread(self, node: Any, why: str) -> None:
        """Keep *node* as what could not be read."""

    def asked(self, node: Any, *values: Value) -> None:
        """Note objects whose class has methods that Python itself calls at *node*, such as ``__bool__``."""

    def operator(self, one: Value, method: str, *others: Value) -> None:
        """Follow an operator that a class of a model defines."""

    def sizes(self, value: Value) -> None:
        """Keep the integers in *value*: a shape is compared with them."""

    def call(self, node: Any, called: Value, given: Arguments) -> Value:
        """Follow a call of *called*."""

    def escapes(self, node: Any, given: Arguments) -> None:
        """Note what is handed to code that is not read."""

    def grown(self, target: Any, before: Value, added: Value) -> None:
        """Add a thing to a container that was made in the call."""
