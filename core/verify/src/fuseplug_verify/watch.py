"""The data from which guards are made: which calls were verified, and what must stay as it was."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from .reading.findings import MISSING

Kind = Any
"""What an argument was in an example: its type, with its value if the type is one of `BY_VALUE`."""

Extra = Literal["drop", "pass", "original"]
"""What happens to keyword arguments without a parameter of the original: they are dropped, because the original ignores
them; the fused code passes them on, as the original does; or the original computes such calls."""

BY_VALUE = (type(None), bool, int, str, torch.dtype)
"""Arguments of these types select what is computed, so each value is verified on its own."""


SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(Ellipsis)}
)
CONTAINERS = (list, tuple, set, frozenset, dict)
_MOST_ITEMS = 16


@dataclass(frozen=True)
class Expected:
    """What something must still be: equal to a scalar or to a short container of scalars, or else the same object.

    It can be compared and hashed, whatever the value is.

    Attributes:
        value: The value; for a container, which may change, a copy.
        key: Equal if the same is expected.
        by_value: Whether an equal value is enough.
    """

    value: Any = field(compare=False)
    key: Hashable
    by_value: bool = False

    @classmethod
    def same(cls, value: Any) -> Expected:
        """Expect the very object *value*, or nothing if *value* is `MISSING`."""
        return cls(value, id(value))

    @classmethod
    def equal(cls, value: Any) -> Expected | None:
        """Expect a value equal to *value*; ``None`` if that is neither a scalar nor a short container of scalars."""
        kind = type(value)
        if kind in SCALARS or issubclass(kind, enum.Enum):
            return None if value != value else cls(value, (kind, value), by_value=True)
        items = list(value.items() if kind is dict else value) if kind in CONTAINERS else None
        if items is None or len(items) > _MOST_ITEMS:
            return None
        parts = [part for item in items for part in (item if kind is dict else (item,))]
        if not all(type(part) in SCALARS for part in parts):
            return None
        key = frozenset(items) if kind in (set, frozenset) else tuple(items)
        return cls(kind(items), (kind, key), by_value=True)

    @property
    def absent(self) -> bool:
        """Whether there must be nothing."""
        return self.value is MISSING


class RouteStep(NamedTuple):
    """One step down from a module, or from an object below one.

    Attributes:
        name: The name of the attribute; ``"*"`` for each item of a list of modules.
        store: Where the attribute is: ``"_modules"``, ``"_parameters"`` or ``"_buffers"`` of a module; ``"plain"`` for
            a module's other attributes; ``"object"`` for those of other objects. For ``"*"``, the length of the list.
    """

    name: str
    store: str | int


Route = tuple[RouteStep, ...]


class Term(NamedTuple):
    """One thing that must stay as it was.

    Attributes:
        kind: ``"bare"``: a child that the original calls and the fused code does not, which must be of this class, with
            no hook and no forward of its own. ``"attribute"``: any attribute. ``"method"``: a method, which must still
            be its class's, and the same function. ``"global"``: the value of a name in a namespace or a closure cell.
            ``"number"``: an attribute that the fused code reads, which must still be an int or a float.
        value: What must be there.
        route: The way to it from the module; for a method, the way to its owner.
        name: The name of a method or a global.
        space: Where a global is looked up.
    """

    kind: Literal["bare", "attribute", "method", "global", "number"]
    value: Expected
    route: Route = ()
    name: str = ""
    space: Expected | None = None

    def described(self) -> str:
        """What is expected, in words."""
        name, value = self.name or ".".join(step.name for step in self.route), self.value.value
        if self.kind == "bare":
            return f"{name} is a plain {value.__name__}, without hooks"
        if self.kind == "number":
            return f"{name} is a number"
        if self.value.absent:
            return f"there is no {name}"
        if self.value.by_value:
            return f"{name} is {value!r:.60}"
        what = getattr(value, "__qualname__", None) or f"the {type(value).__name__} that it was"
        return f"{name} is {what!s:.60}"


@dataclass(frozen=True)
class Call:
    """One way of calling the target that was verified.

    Attributes:
        count: How many arguments are given by position, including the module.
        names: The names of the arguments that are given by name.
        kinds: The kinds of each argument, in this order; empty for the module.
        ranks: The numbers of dimensions of each argument; empty where they make no difference.
        together: The kinds that those arguments had together which had several; empty if every combination was tried.
    """

    count: int
    names: tuple[str, ...]
    kinds: tuple[frozenset[Kind], ...]
    ranks: tuple[frozenset[int], ...]
    together: frozenset[tuple[Kind, ...]] = frozenset()

    def has(self, args: Sequence[Any]) -> bool:
        """Whether *args*, the module first, are of kinds that were tried together."""
        return tuple([kind_of(args[n]) for n, kinds in enumerate(self.kinds) if len(kinds) > 1]) in self.together

    def limited(self, main: int, ranks: frozenset[int]) -> Call:
        """This call with the main input limited to *ranks*; unchanged if *ranks* is empty."""
        if not ranks:
            return self
        allowed = self.ranks[main] & ranks if self.ranks[main] else ranks
        return replace(self, ranks=(*self.ranks[:main], allowed, *self.ranks[main + 1 :]))


@dataclass(frozen=True)
class Watch:
    """What is compared at each call besides the kinds, ranks and dtypes of the arguments.

    Attributes:
        terms: What must stay as it was.
        nonempty: Whether the main input must have elements.
        contiguous: Whether the main input must be contiguous.
        no_autocast: Whether autocast must be off.
        no_grad: Whether gradients must be off.
        unhooked: Whether the module must have no hooks that see its result or the gradient of its result.
        untraced: Whether nothing may trace the call, or see its operations.
    """

    terms: tuple[Term, ...] = ()
    nonempty: bool = False
    contiguous: bool = False
    no_autocast: bool = False
    no_grad: bool = False
    unhooked: bool = False
    untraced: bool = False

    def described(self) -> list[str]:
        """Everything that is watched, in words."""
        flags = [text for name, text in _FLAGS.items() if getattr(self, name)]
        return [term.described() for term in self.terms] + flags


_FLAGS = {
    "nonempty": "the input has elements",
    "contiguous": "the input is contiguous",
    "no_autocast": "autocast is off",
    "no_grad": "gradients are off",
    "unhooked": "it has no hooks that see its result",
    "untraced": "nothing traces the call",
}


def kind_of(value: Any) -> Kind:
    """What the guard compares of the argument *value*."""
    if isinstance(value, BY_VALUE):
        return type(value), value
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)


Dtypes = tuple[torch.dtype | None, ...]
"""The dtypes that occur together in one call."""


@dataclass(frozen=True)
class VerifiedCalls:
    """The calls for which it is known what an original computes.

    Attributes:
        calls: The ways in which the original was called.
        main: The number of the argument that is the main input, counting the module.
        typed: The tensors whose dtypes matter: arguments by number, tensors of the module itself by name.
        dtypes: Their dtypes, in each combination that was verified.
        watch: What else must be as it was.
        extra: What happens to keyword arguments that the original has no parameters for.
    """

    calls: tuple[Call, ...]
    main: int
    typed: tuple[int | str, ...]
    dtypes: tuple[Dtypes, ...]
    watch: Watch = Watch()
    extra: Extra = "original"
