"""What is known about a value while code is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .findings import MISSING, Path
from .lookup import is_a

_MOST = 16


class Items(list["Value"]):
    """The items of a container that was made in the call. All names for the container share them.

    Attributes:
        exact: Whether these are all the items, in order; otherwise each item is one of them.
    """

    def __init__(self, values: Iterable[Value], *, exact: bool) -> None:
        super().__init__(values)
        self.exact = exact

    def add(self, value: Value) -> None:
        """Note that *value* is put into the container somewhere."""
        self.exact = False
        if value.key not in [item.key for item in self]:
            self.append(value)


@dataclass(frozen=True, eq=False)
class Value:
    """What a name or an expression stands for, as far as reading tells.

    Attributes:
        object: The object itself, if it is known.
        path: Where it is below the module.
        tried: Whether it depends on what only examples can vary, as in `Reading.branches`.
        fresh: Whether it was made in the call. Changing it then has no effect after the call.
        argument: Whether it is an argument of what is read, or part of one.
        items: Its items, if it is a container made in the call.
        named: Its items by name, if it is the ``**kwargs`` of a function, or a dict made in the call whose keys are
            known strings; ``None`` stands for other names.
        options: The values that it may be, if it is one of several.
        receiver: What it is a method or an attribute of.
        name: Its name there.
        cls: The class of which it is an instance, if it is a module, context or distribution made in the call; for
            ``super()``, the class whose bases are searched.
        fields: The attributes of a module made in the call. All names for it share them.
    """

    object: Any = MISSING
    path: Path | None = None
    tried: bool = False
    fresh: bool = True
    argument: bool = False
    items: Items | None = None
    named: Mapping[str | None, Value] | None = None
    options: tuple[Value, ...] = ()
    receiver: Value | None = None
    name: str = ""
    cls: type | None = None
    fields: dict[str, Value] | None = None

    @property
    def each(self) -> tuple[Value, ...]:
        """All values that it may be."""
        return self.options or (self,)

    @property
    def known(self) -> bool:
        """Whether the very object is known."""
        return self.object is not MISSING

    @property
    def foreign(self) -> bool:
        """Whether it may outlive the call without being an argument."""
        return any(not option.fresh and not option.argument for option in self.each)

    @property
    def key(self) -> Any:
        """Equal for values of which the same is known."""
        items = None if self.items is None else (self.items.exact, *(item.key for item in self.items))
        named = None if self.named is None else tuple((name, value.key) for name, value in self.named.items())
        options, receiver = tuple(option.key for option in self.options), self.receiver and self.receiver.key
        ids = (id(self.object), id(self.cls), id(self.fields))
        return (ids, self.path, self.tried, self.fresh, self.argument, self.name, items, named, options, receiver)


NOTHING = Value()
NEVER = Value(name="(never)")
"""The value of an expression that raises: there is none."""
ARGUMENT = Value(tried=True, fresh=False, argument=True)
"""An argument of which nothing is known."""
UNREAD = Value(tried=True, fresh=False)
"""Something that could not be read, and may be anything."""


def known(thing: Any, *, fresh: bool = True) -> Value:
    """The value that is this very object."""
    return Value(object=thing, tried=is_a(thing, Tensor), fresh=fresh)


def is_tried(values: Iterable[Value]) -> bool:
    """Whether any of *values* depends on what only examples can vary."""
    return any(value.tried or is_tried(value.items or ()) for value in values)


def either(values: Iterable[Value]) -> Value:
    """The value that may be any of *values*; `NEVER` if there are none."""
    several = [option for value in values for option in value.each if option is not NEVER]
    if len(several) > 1:
        several = list({option.key: option for option in several}.values())
    if len(several) < 2:
        return several[0] if several else NEVER
    tried, fresh = is_tried(several), all(option.fresh for option in several)
    argument = not fresh and not any(option.foreign for option in several)
    if len(several) > _MOST:
        return UNREAD
    return Value(tried=tried, fresh=fresh, argument=argument, options=tuple(several))


def listed(values: Iterable[Value], *, exact: bool = True) -> Value:
    """A container made in the call."""
    items = Items(values, exact=exact)
    return Value(tried=is_tried(items), items=items)


def part_of(*wholes: Value) -> Value:
    """Something unknown that is computed from *wholes* and may share memory with the first."""
    first = wholes[0]
    return Value(tried=is_tried(wholes), fresh=first.fresh, argument=first.argument)
