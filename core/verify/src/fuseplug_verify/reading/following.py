"""What the parts of the reader ask of each other: expressions hold calls, and a call is followed into expressions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from .arguments import Arguments
from .findings import Finding, Path, Reading
from .values import Value


class Following(Protocol):
    """What follows code from function to function: `fuseplug_verify.reading.reader.Reader`.

    Attributes:
        reading: What is found.
        inside: The path of the module whose forward is read.
    """

    reading: Reading
    inside: Path

    def is_at_home(self, where: str) -> bool:
        """Whether the Python module *where* is of the package that is read."""

    def keep(self, findings: list[Finding], finding: Finding) -> None:
        """Keep *finding*, once."""

    def looked(self, space: Any, name: str, value: Any, owner: Any = None) -> None:
        """Keep a name that was looked up outside the module."""

    def function(self, function: Any, arguments: Arguments) -> Value:
        """Follow a call of *function*."""

    def module(self, walk: Walking, node: Any, value: Value, arguments: Arguments) -> Value:
        """Follow a call of a module."""


class Walking(Protocol):
    """What goes through the code of one function: `fuseplug_verify.reading.statements.Walk`.

    Attributes:
        reader: What it goes for.
    """

    reader: Following

    def note(self, findings: list[Finding], node: Any, why: str = "") -> None:
        """Keep *node* as a finding."""

    def unread(self, node: Any, why: str) -> None:
        """Keep *node* as what could not be read."""

    def opaque(self, node: Any, *values: Value) -> None:
        """Note objects of a model's classes with which Python itself does something."""

    def sizes(self, values: Iterable[Value]) -> None:
        """Keep the integers in *values*."""

    def owner_of(self, thing: Any) -> Value:
        """The value that is *thing*."""
