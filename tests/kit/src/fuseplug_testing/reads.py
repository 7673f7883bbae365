"""Does an adapter read from the module what it declares, no less and no more, except for the children that it calls?

Reads are noted while the adapter's bound reference runs. Reads that cannot be noted, such as through ``vars(module)``,
show when the value is changed: then the result differs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug_verify import Outcome

from .attempts import Raised, attempt
from .results import Finding
from .subjects import Case

_OF_EVERY_MODULE = frozenset((*dir(nn.Module), *vars(nn.Module()))) - {"_parameters", "_buffers", "_modules"}
"""The attributes of every module: hooks, the training flag, methods. Fuseplug itself takes care of these."""


def reads(case: Case) -> Iterator[Finding]:
    """The adapter's `reads` names everything that it reads, except children that it calls, and nothing else."""
    declared = getattr(case.semantics.adapter, "reads", ())
    if not (isinstance(declared, tuple) and all(isinstance(name, str) for name in declared)):
        yield Finding("reads", fault=f"must be a tuple of dotted names below the module, not {declared!r:.100}")
        return
    if case.subject.module is None:
        for name in declared:
            yield Finding(name, fault="is declared, and a function that is replaced is given no module to read it from")
        yield Finding("")
        return
    notes = _noted(case)
    felt = set() if notes.falls_back else {name for name in _changeable(case) if _matters(case, name)}
    found = notes.read() | felt
    wanted = found - notes.called
    if not (declared or wanted):
        yield Finding("")
    for name in declared:
        seen = any(_within(each, name) or _within(name, each) for each in found | notes.methods)
        yield Finding(name, fault="" if seen else "is declared in reads, and never read: take it out, or read it")
    for name in sorted(wanted):
        covered = any(_within(name, each) or _within(each, name) for each in declared)
        lacking = f"is read at each call, and not declared: add {name!r} to the adapter's reads"
        yield Finding(name, fault="" if covered else lacking)


def _within(name: str, other: str) -> bool:
    """Whether *name* is *other* or something below it; ``"*"`` is each item of a list of modules."""
    steps, above = name.split("."), other.split(".")
    return len(above) <= len(steps) and all(a == b or "*" in (a, b) for a, b in zip(above, steps, strict=False))


def _noted(case: Case) -> Notes:
    """Note the reads in every mix, with both training flags, with and without gradients."""
    notes = Notes(getattr(case.subject.original, "__code__", None))
    for mix in case.proposal.mixes:
        for training in (None, not case.subject.module.training):  # type: ignore[union-attr]
            for gradients in (True, False):

                def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                    with notes.of(module):
                        return case.reference(module, *args, **kwargs)

                def noted(mix: Any = mix, training: bool | None = training, gradients: bool = gradients) -> Outcome:
                    return case.subject.run(noting, case.example(mix), training=training, gradients=gradients)

                attempt(noted)  # if it raises, another check says so
    return notes


class Notes:
    """The reads from a module and the modules below it, by dotted names.

    Args:
        original: The code of the original. If the original is called after all, its reads are not the adapter's.

    Attributes:
        falls_back: Whether the original was called.
        called: The children that were called, whose names need not be declared.
        methods: The names that were found on classes, which may be declared but need not be.
    """

    def __init__(self, original: Any) -> None:
        self.falls_back = False
        self.called: set[str] = set()
        self.methods: set[str] = set()
        self._original = original
        self._leaves: set[str] = set()

    def read(self) -> set[str]:
        """The names that were read; a child is left out if something below it was read."""
        return {name for name in self._leaves if not any(each.startswith(f"{name}.") for each in self._leaves)}

    @contextlib.contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:  # noqa: C901 - what is put on must come off in one place
        """Note the reads from *module* in this thread, except those by the forwards of its children."""
        paths = {id(part): path for path, part in module.named_modules()}
        here = threading.get_ident()
        calls: list[nn.Module] = []
        usual, called = nn.Module.__call__, nn.Module.__dict__.get("__getattribute__")

        def note(part: nn.Module, name: str, frame: Any) -> None:
            if calls or threading.get_ident() != here or (path := paths.get(id(part))) is None:
                return
            if name in _OF_EVERY_MODULE or name.startswith("__"):
                return
            if callable(getattr(type(part), name, None)):
                self.methods.add(f"{path}.{name}".lstrip("."))
            elif self._by_the_original(frame):
                self.falls_back = True
            else:
                self._leaves.add(f"{path}.{name}".lstrip("."))

        def reading(part: nn.Module, name: str) -> Any:
            if name not in ("__dict__", "__class__", "_parameters", "_buffers", "_modules"):
                note(part, name, sys._getframe(1))
            return object.__getattribute__(part, name)

        def calling(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not calls and id(part) in paths:
                self.called.add(paths[id(part)])
            calls.append(part)
            try:
                return usual(part, *args, **kwargs)
            finally:
                calls.pop()

        kept = []
        for part in list(module.modules()):
            for store in ("_parameters", "_buffers", "_modules"):
                held = part.__dict__[store]
                kept.append((part, store, held))
                part.__dict__[store] = _Noting(held, functools.partial(note, part))
        nn.Module.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        nn.Module.__call__ = calling  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = usual  # type: ignore[method-assign]
            if called is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = called  # type: ignore[method-assign]
            for part, store, held in kept:
                part.__dict__[store] = held

    def _by_the_original(self, frame: Any) -> bool:
        while frame is not None and frame.f_code is not Notes.of.__wrapped__.__code__:  # type: ignore[attr-defined]
            if frame.f_code is self._original:
                return True
            frame = frame.f_back
        return False


class _Noting(dict[str, Any]):
    """A registry of a module that notes which of its entries are read."""

    def __init__(self, held: dict[str, Any], note: Callable[[str, Any], None]) -> None:
        super().__init__(held)
        self._note = note

    def _noted(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self:
                self._note(name, sys._getframe(2))

    def __getitem__(self, name: str) -> Any:
        self._noted([name])
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._noted([name])
        return super().get(name, default)

    def values(self) -> Any:
        self._noted(self)
        return super().values()

    def items(self) -> Any:
        self._noted(self)
        return super().items()


def _changeable(case: Case) -> list[str]:
    """The dotted names of the numbers and floating-point tensors of a twin and its children."""
    found: list[str] = []

    def listing(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for path, part in module.named_modules():
            held = {**vars(part), **part._parameters, **part._buffers}
            found.extend(
                f"{path}.{name}".lstrip(".")
                for name, value in held.items()
                if name not in _OF_EVERY_MODULE and _other(value) is not None
            )
        return case.reference(module, *args, **kwargs)

    case.subject.run(listing, case.example(), gradients=False)
    return found


def _other(value: Any) -> Any:
    """A replacement that shows wherever *value* is used; ``None`` if there is none."""
    if isinstance(value, Tensor):
        return torch.full_like(value, math.nan) if value.is_floating_point() and not value.is_meta else None
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return math.nan
    return value + 1 if isinstance(value, int) else None


def _matters(case: Case, name: str) -> bool:
    """Whether the bound reference gives another result, or raises, once *name* has another value.

    Children may read anything while they are called; only reads outside of their calls count.
    """
    path, _, attribute = name.rpartition(".")

    def changed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        part = module.get_submodule(path)
        store = next(held for held in (part._parameters, part._buffers, vars(part)) if attribute in held)
        value, other = store[attribute], _other(store[attribute])
        store[attribute] = nn.Parameter(other) if isinstance(value, nn.Parameter) else other
        with _as_usual_when_called(module, store, attribute, value):
            return case.reference(module, *args, **kwargs)

    usual = case.subject.run(case.reference, case.example(), gradients=False)
    other = attempt(lambda: case.subject.run(changed, case.example(), gradients=False))
    # If changing a number makes the reference raise, the reference reads it.
    return isinstance(other, Raised) or bool(_outputs(other).difference(_outputs(usual)))


def _outputs(outcome: Outcome) -> Outcome:
    values = {name: value for name, value in outcome.values.items() if name.startswith("output")}
    return Outcome(values, outcome.structure)


@contextlib.contextmanager
def _as_usual_when_called(module: nn.Module, store: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Inside, modules below *module* find the usual *value* of *name* in *store* while they are called."""
    usual, below = nn.Module.__call__, {id(part) for part in module.modules()} - {id(module)}

    def calling(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(part) not in below:
            return usual(part, *args, **kwargs)
        other, store[name] = store[name], value
        try:
            return usual(part, *args, **kwargs)
        finally:
            store[name] = other

    nn.Module.__call__ = calling  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = usual  # type: ignore[method-assign]
