"""A weak mapping that asks which object a key is, never what the key says it is equal to."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(Generic[K, V]):
    """Values for objects, for as long as the objects live.

    A module may define ``__eq__`` or have no ``__hash__``. ``WeakKeyDictionary`` would take two equal ones for one.
    Values stay even if the mapping itself goes, as that of a manager which nobody holds does. In torch's
    ``WeakIdKeyDictionary`` they would go, too, and with them whoever warns of kernels that are not in use.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[K], V]] = {}

    def __setitem__(self, key: K, value: V) -> None:
        items, number = self._items, id(key)

        def forget(reference: weakref.ref[K]) -> None:
            # The number may belong to a new object by now.
            if number in items and items[number][0] is reference:
                del items[number]

        items[number] = (weakref.ref(key, forget), value)

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        """The value of *key*; ``None`` if there is none."""
        reference, value = self._items.get(id(key), (None, None))
        return value if reference is not None and reference() is key else None

    def pop(self, key: K) -> V | None:
        """Remove *key* and return its value; ``None`` if there is none."""
        value = self.get(key)
        self._items.pop(id(key), None)
        return value
