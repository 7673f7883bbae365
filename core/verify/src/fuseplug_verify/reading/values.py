"""What is known about a value while code is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .found import MISSING, Path
from .lookup import is_a

_MOST = 16
_PLAIN = (int, float, complex, str, bytes, bool, tuple, frozenset, range, type(None), type(...))


@dataclass(frozen=True, eq=False)
class Value:
    """What a name or an expression stands for, as far as reading tells.

    Attributes:
        kinds: What it derives from, as in `Finding.kinds`.
        path: Where it is below the module.
        object: The object itself, if it is known.
        owned: Whether it was made in the call. Changing it then has no effect after the call.
        given: Whether it is an argument of what is read, or part of one.
        items: What is in it, if it is a container made in the call.
        exact: Whether *items* are all its items, in order; otherwise each item is one of them.
        options: What it may be, if it is one of several things.
        receiver: What it is a method of.
        name: What it is called as a method.
        made: The class that it is an instance of, if it was made in the call.
        local: The function that it is, if it was defined in the call.
        named: What is in it by name, if it is a dict made in the call and all of it is known, but for *others*.
        others: What may be in it besides, by names that are not known.
        fields: The attributes it was given, if it was made in the call.
        after: For ``super()``: the class whose bases are looked through.
    """

    kinds: frozenset[str] = frozenset()
    path: Path | None = None
    object: Any = MISSING
    owned: bool = True
    given: bool = False
    items: tuple[Value, ...] | None = None
    exact: bool = True
    options: tuple[Value, ...] = ()
    receiver: Value | None = None
    name: str = ""
    made: type | None = None
    local: Any = None
    named: dict[str, Value] | None = None
    others: Value | None = None
    fields: dict[str, Value] | None = None
    after: type | None = None
    _key: list[Any] = field(default_factory=list, repr=False)

    @property
    def each(self) -> tuple[Value, ...]:
        """What it may be."""
        return self.options or (self,)

    @property
    def known(self) -> bool:
        """Whether the very object is known."""
        return self.object is not MISSING

    @property
    def foreign(self) -> bool:
        """Whether it outlives the call and is no argument."""
        return any(not v.owned and not v.given for v in self.each)

    @property
    def unchangeable(self) -> bool:
        """Whether it is a number, a string or the like, which ``+=`` does not change."""
        return all(is_a(v.object, _PLAIN) for v in self.each)

    @property
    def key(self) -> Any:
        """Equal where the same is known of the values."""
        if not self._key:
            parts = None if self.items is None else tuple(v.key for v in self.items)
            receiver = self.receiver and self.receiver.key
            options = tuple(v.key for v in self.options)
            named = None if self.named is None else tuple((n, v.key) for n, v in self.named.items())
            ids = (id(self.object), id(self.local), id(self.fields), id(self.made), id(self.after))
            self._key.append((self.kinds, self.path, ids, self.owned, self.given, parts, self.exact, options,
                              receiver, self.name, named, self.others and self.others.key))  # fmt: skip
        return self._key[0]

    def of(self, *kinds: str) -> Value:
        """The same, of other kinds."""
        return replace(self, kinds=frozenset(kinds), _key=[])


NOTHING = Value()
NEVER = Value(name="never")
"""The value of an expression that raises: there is none."""


def known(thing: Any, *kinds: str, owned: bool = True) -> Value:
    """The value that is this very object."""
    return Value(frozenset(kinds), object=thing, owned=owned)


def kinds_of(values: Iterable[Value]) -> frozenset[str]:
    """What any of *values* derives from."""
    return frozenset().union(*(v.kinds for v in values))


def either(values: Iterable[Value]) -> Value:
    """The value that may be any of *values*."""
    options: dict[Any, Value] = {}
    for value in values:
        options.update((v.key, v) for v in value.each if v is not NEVER)
    found = list(options.values())
    if len(found) < 2:
        return found[0] if found else NEVER
    kinds, owned, given = kinds_of(found), all(v.owned for v in found), all(v.given or v.owned for v in found)
    given = given and any(v.given for v in found)
    plain = all(v.path is None and not v.known and v.items is None and v.receiver is None for v in found)
    if (plain and all(v.made is None and v.local is None for v in found)) or len(found) > _MOST:
        return Value(kinds, owned=owned and len(found) <= _MOST, given=given)
    return Value(kinds, owned=owned, given=given, options=tuple(found))


def listed(items: Iterable[Value], *, exact: bool = True) -> Value:
    """A container made in the call."""
    items = tuple(items)
    items = items if exact else (either(items),) if items else ()
    return Value(kinds_of(items), items=items, exact=exact)


def part_of(whole: Value, *kinds: str) -> Value:
    """An unknown part of *whole*, with the same owner."""
    return Value(frozenset(kinds) or whole.kinds, owned=whole.owned, given=whole.given)
