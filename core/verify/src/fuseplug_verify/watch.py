"""The calls for which something was verified, and what must stay as it was: data, from which guards are made."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from .reading import MISSING

Kind = Any
"""What an argument was in an example: ``Tensor`` or another type, or the very value of a flag, a number or ``None``."""

Extra = Literal["drop", "pass", "original"]
"""What becomes of keyword arguments that the original has no parameters for: it ignores them; or it hands them on, and
so does the fused code; or such calls are the original's."""

BY_VALUE = (type(None), bool, int, str, torch.dtype)
"""Arguments of these types select what is done, so each value is verified on its own."""


SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(Ellipsis)}
)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_MOST_ITEMS = 16


class Frozen(NamedTuple):
    """A hashable copy of a value, in place of a container that may change."""

    kind: type
    value: Any

    @property
    def absent(self) -> bool:
        """Whether it stands for a name that means nothing: as `ById.absent`."""
        return False

    @property
    def by_value(self) -> bool:
        """Whether what is there later must be equal to `held`, and not the same object."""
        return True

    @property
    def held(self) -> Any:
        """The value as it was found."""
        return self.kind(self.value) if self.kind in _CONTAINERS else self.value


def freeze(value: Any) -> Frozen | None:
    """*value* as `Frozen`; ``None`` if it is neither a scalar nor a short container of scalars."""
    kind = type(value)
    if kind in SCALARS or issubclass(kind, enum.Enum):
        return None if value != value else Frozen(kind, value)
    items = list(value.items() if kind is dict else value) if kind in _CONTAINERS else None
    if items is None or len(items) > _MOST_ITEMS:
        return None
    parts = [part for item in items for part in (item if kind is dict else (item,))]
    if not all(type(part) in SCALARS for part in parts):
        return None
    return Frozen(kind, frozenset(items) if kind in (set, frozenset) else tuple(items))


class ById:
    """An object that is equal to itself alone, so that what holds it can be compared and hashed."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    @property
    def absent(self) -> bool:
        """Whether it stands for a name that means nothing."""
        return self.held is MISSING

    @property
    def by_value(self) -> bool:
        """As `Frozen.by_value`."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


class Step(NamedTuple):
    """One step down from a module, or from an object below one.

    Attributes:
        name: Of the attribute; ``"*"`` for each item of a list of modules.
        store: Where it is: ``"_modules"``, ``"_parameters"`` or ``"_buffers"`` of a module; ``"plain"`` for its other
            attributes; ``"object"`` for those of what is no module; or how many items a list has.
    """

    name: str
    store: str | int


Route = tuple[Step, ...]


class Bare(NamedTuple):
    """A child that the original calls and the fused code does not: it must have no hook and no own forward."""

    route: Route
    cls: type


class Equal(NamedTuple):
    """A number, flag, string, ``None``, or short container of these: it must still be equal."""

    route: Route
    value: Frozen


class Same(NamedTuple):
    """Any other object: it must still be the same object."""

    route: Route
    value: ById


class Missing(NamedTuple):
    """An attribute that the original asked for and that did not exist."""

    route: Route


class Method(NamedTuple):
    """A method of what is at *route*: it must still be its class's, and the same function."""

    route: Route
    name: str
    function: ById


class Global(NamedTuple):
    """What a name means in the Python module whose names *space* holds."""

    space: ById
    name: str
    value: ById | Frozen


Term = Bare | Equal | Same | Missing | Method | Global


@dataclass(frozen=True)
class Call:
    """One way of calling that was verified.

    Attributes:
        count: How many arguments are given by position, the module counted.
        names: Those given by name.
        kinds: What each of these was, in order; empty for the module.
        ranks: The numbers of dimensions that each had; empty where they make no difference.
    """

    count: int
    names: tuple[str, ...]
    kinds: tuple[frozenset[Kind], ...]
    ranks: tuple[frozenset[int], ...]

    def limited(self, main: int, ranks: frozenset[int]) -> Call:
        """This, with no other *ranks* of the main input, if there are any."""
        if not ranks:
            return self
        known = self.ranks[main]
        every = list(self.ranks)
        every[main] = known & ranks if known else ranks
        return replace(self, ranks=tuple(every))


@dataclass(frozen=True)
class Watch:
    """Everything that is compared at each call.

    Attributes:
        bare: Children that are no longer called.
        equal: What was read below the module, by value.
        same: What was read there, by identity.
        missing: What was asked for there and not found.
        methods: Methods that are called.
        spaces: What was looked up elsewhere.
        nonempty: Whether the main input must have elements.
        contiguous: Whether it must lie in memory without gaps and in order.
        no_autocast: Whether autocast must be off.
        no_grad: Whether gradients must be off.
        unhooked: Whether the module must have no hooks that see its result or the gradient of it.
        untraced: Whether nothing may trace the call.
    """

    bare: tuple[Bare, ...] = ()
    equal: tuple[Equal, ...] = ()
    same: tuple[Same, ...] = ()
    missing: tuple[Missing, ...] = ()
    methods: tuple[Method, ...] = ()
    spaces: tuple[Global, ...] = ()
    nonempty: bool = False
    contiguous: bool = False
    no_autocast: bool = False
    no_grad: bool = False
    unhooked: bool = False
    untraced: bool = False

    def and_(self, *terms: Term) -> Watch:
        """This, and these."""
        found = {name: getattr(self, name) for name in _TERMS.values()}
        for term in terms:
            found[_TERMS[type(term)]] += (term,)
        return replace(self, **found)

    def described(self) -> list[str]:
        """Each thing that is watched, for a person."""
        found = [f"{_dotted(route)} is a plain {cls.__name__}, without hooks" for route, cls in self.bare]
        found += [f"{_dotted(route)} is {value.value!r:.60}" for route, value in self.equal]
        found += [f"{_dotted(route)} is {_shown(value.held)}" for route, value in self.same]
        found += [f"there is no {_dotted(route)}" for (route,) in self.missing]
        found += [f"{name} is {_shown(function.held)}" for _, name, function in self.methods]
        found += [_meant(name, value) for _, name, value in self.spaces]
        found += ["the input has elements"] if self.nonempty else []
        found += ["the input is contiguous"] if self.contiguous else []
        found += ["autocast is off"] if self.no_autocast else []
        found += ["gradients are off"] if self.no_grad else []
        found += ["it has no hooks that see its result"] if self.unhooked else []
        found += ["nothing traces the call"] if self.untraced else []
        return found


NOTHING = Watch()

_TERMS: dict[type, str] = {
    Bare: "bare",
    Equal: "equal",
    Same: "same",
    Missing: "missing",
    Method: "methods",
    Global: "spaces",
}


def _dotted(route: Route) -> str:
    return ".".join(step.name for step in route)


def _meant(name: str, value: ById | Frozen) -> str:
    if isinstance(value, Frozen):
        return f"{name} is {value.value!r:.60}"
    return f"there is no {name}" if value.absent else f"{name} is {_shown(value.held)}"


def _shown(held: Any) -> str:
    return str(getattr(held, "__qualname__", None) or f"the {type(held).__name__} that it was")[:60]


def kind_of(value: Any) -> Kind:
    """What *value*, an argument, is to the guard."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    return (type(value), value) if isinstance(value, BY_VALUE) else type(value)


Dtypes = tuple[torch.dtype | None, ...]
"""The dtypes that occur together in one call."""


@dataclass(frozen=True)
class VerifiedCalls:
    """The calls for which it was found what an original computes.

    Attributes:
        calls: The ways in which it was called.
        main: Which argument is the main input, the module counted.
        typed: The tensors whose dtypes count: arguments by number, others by where they are below the module.
        dtypes: Their dtypes, in each combination that was verified.
        watch: What else must be as it was.
        extra: What becomes of keyword arguments that the original has no parameters for.
    """

    calls: tuple[Call, ...]
    main: int
    typed: tuple[int | Route, ...]
    dtypes: tuple[Dtypes, ...]
    watch: Watch = NOTHING
    extra: Extra = "original"
