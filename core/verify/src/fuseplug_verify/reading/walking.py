"""What the parts of the reader share: expressions contain calls, and following a call leads to expressions."""

from __future__ import annotations

import ast
import enum
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .arguments import Arguments
from .findings import CodePlace, Looked, Path, Reading
from .libraries import home, is_library
from .lookup import is_a
from .values import NOTHING, UNREAD, Value, known

_TRANSPARENT = (nn.Module, Tensor, type, types.FunctionType, types.ModuleType, enum.Enum)


class Following:
    """Follows code from function to function and to modules, and keeps what is found.

    Attributes:
        reading: What is found.
        inside: The path of the module whose forward is read.
    """

    def __init__(self, where: str) -> None:
        self.reading = Reading()
        self.inside: Path = ()
        self._package = where.partition(".")[0]
        self._seen: set[Any] = set()

    def is_at_home(self, where: str) -> bool:
        """Whether the Python module *where* belongs to the package that is read."""
        return where.partition(".")[0] == self._package

    def keep(self, places: list[CodePlace], place: CodePlace) -> None:
        """Keep *place*, once."""
        if (id(places), place) not in self._seen:
            self._seen.add((id(places), place))
            places.append(place)

    def unread(self, text: str) -> Value:
        """Keep *text*, which says what could not be read."""
        self.keep(self.reading.unknown, CodePlace(text, self.inside))
        return UNREAD

    def looked(self, space: Any, name: str, value: Any, owner: Any = None) -> None:
        """Keep a name that was looked up outside the module; *owner* is the class whose namespace *space* is."""
        if (key := (id(space if owner is None else owner), name, self.inside)) not in self._seen:
            self._seen.add(key)
            self.reading.globals.append(Looked(space, name, value, self.inside, key[0]))

    def function(self, function: types.FunctionType, arguments: Arguments) -> Value:
        """Follow a call of *function*."""
        raise NotImplementedError

    def module(self, walk: Walking, node: Any, value: Value, arguments: Arguments) -> Value:
        """Follow a call of a module."""
        raise NotImplementedError


class Walking:
    """Goes through the code of one function, and notes what is found there.

    Attributes:
        reader: The reader that it works for.
        function: The function.
        names: What the function's names stand for.
    """

    def __init__(self, reader: Following, function: types.FunctionType, names: dict[str, Value]) -> None:
        self.reader, self.function, self.names = reader, function, names

    def note(self, places: list[CodePlace], node: Any, why: str = "") -> None:
        """Keep *node* as one of *places*."""
        source = " ".join(ast.unparse(node).split())
        name, outside = self.function.__qualname__, home(self.function)
        where = name if self.reader.is_at_home(outside) else f"{outside}.{name}"
        shown = source if len(source) <= 90 else source[:87] + "..."
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        text = f"{why}{shown} (line {node.lineno} of {where})"
        file = self.function.__code__.co_filename
        self.reader.keep(places, CodePlace(text, self.reader.inside, file, span, source))

    def unread(self, node: Any, why: str) -> Value:
        """Keep *node* as code that could not be read."""
        self.note(self.reader.reading.unknown, node, f"{why}: ")
        return UNREAD

    def opaque(self, node: Any, *values: Value) -> None:
        """Note objects of a model's classes on which Python itself operates, as in ``float(value)``."""
        for option in (option for value in values for option in value.each):
            if option.fields is not None or (
                option.known and not is_a(option.object, _TRANSPARENT) and not is_library(option.object)
            ):
                cls = option.cls or type(option.object)
                self.unread(node, f"methods of {cls.__name__} decide the result, and are not read")

    def sizes(self, values: Iterable[Value]) -> None:
        """Keep the integers in *values*, because shapes are compared with them."""
        for option in (option for value in values for option in value.each):
            numbers = option.object if type(option.object) in (tuple, list, set, frozenset) else (option.object,)
            self.reader.reading.sizes |= {int(n) for n in numbers if type(n) in (int, float) and n == n // 1}
            self.sizes(option.items or ())

    def owner_of(self, thing: Any) -> Value:
        """The value for *thing*, with its path if it is the module whose method is read."""
        itself = self.names.get("self", NOTHING)
        return itself if itself.object is thing else known(thing, fresh=False)
