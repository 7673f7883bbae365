"""Finds the kernels that a user's words stand for, and those that take part."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from ..configuration import SETTINGS, named
from ..contract import Mode
from ..errors import DiscoveryError, PlanError
from .ownership import normal
from .records import KernelRecord

KERNELS_VARIABLE = SETTINGS["kernels"].variable
ALLOW_VARIABLE = SETTINGS["allow"].variable


def names_in(value: str | Sequence[str]) -> tuple[str, ...]:
    """The names in *value*, which is one name or several.

    Raises:
        PlanError: If *value* is something else.
    """
    names = tuple(value) if isinstance(value, Iterable) and not (value and isinstance(value, str)) else (value,)
    if not all(isinstance(name, str) for name in names):
        raise PlanError(f"expected a name, or a list of names, found {value!r}: write each name as a string")
    return names


def select(
    records: Sequence[KernelRecord], include: Sequence[str] | str | None, unwanted: Sequence[str], mode: Mode
) -> list[KernelRecord]:
    """The *records* that are ready, that *include* names, that are not *unwanted*, and that serve *mode*."""
    ready = [record for record in records if record.state == "ready"]
    if include is not None:
        wanted = [record.name for word in names_in(include) for record in named_by(records, word)]
        ready = [record for record in ready if record.name in wanted]
    return [
        record
        for record in ready
        if record.name not in unwanted and (mode == "inference" or (record.kernel and record.kernel.differentiable))
    ]


def named_by(records: Sequence[KernelRecord], word: str, *, must_be_ready: bool = True) -> list[KernelRecord]:
    """The kernels that *word*, an id or an op, stands for."""
    by_id = [record for record in records if word in (record.kernel_id, record.name)]
    ready = [record for record in by_id if record.state == "ready"]
    for record in by_id if must_be_ready and not ready else ():
        if record.state != "ready":
            raise DiscoveryError(
                f"kernel {record.name} was asked for by name, but is {record.condition}: {record.reason}", record=record
            )
    named = by_id or [record for record in records if record.kernel and record.kernel.op == word]
    if not named:
        names = sorted({r.kernel_id for r in records} | {r.kernel.op for r in records if r.kernel})
        raise DiscoveryError(_unknown(word, names), word=word)
    return named


def _unknown(word: str, names: Sequence[str]) -> str:
    if not names:
        return f"no kernel or op {word!r} is installed, nor any other: pip install fuseplug-rmsnorm, for one"
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.4)
    others = f"nearest installed: {', '.join(near)}" if near else f"installed: {', '.join(names)}"
    return f"no kernel or op {word!r} is installed; {others} (see `fuseplug list`)"


def allowed(environ: Mapping[str, str]) -> set[str] | None:
    """The distributions that ``FUSEPLUG_ALLOW`` names; ``None`` if it is not set, which allows all."""
    value = environ.get(ALLOW_VARIABLE)
    return None if value is None else {normal(name) for name in _split(value)}


def _split(value: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", value) if word]


class Selection:
    """``FUSEPLUG_KERNELS``: ids to use, ``-id`` to omit, ``none`` for nothing; an id may be ``distribution:id``."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.said_by, value = named(environ, KERNELS_VARIABLE), environ.get(KERNELS_VARIABLE)
        words = _split(value or "")
        self.nothing = "none" in words or (value is not None and not words)
        self.wanted = [word for word in words if not word.startswith("-") and word != "none"]
        self.unwanted = [word[1:] for word in words if word.startswith("-")]

    def refuses(self, record: KernelRecord) -> str:
        """Why *record* must not be used; ``""`` if it may be."""
        if self.nothing:
            return f"{self.said_by} turns every kernel off"
        if self._names(record, self.unwanted):
            return f"{self.said_by} leaves it out"
        if self.wanted and not self._names(record, self.wanted):
            return f"{self.said_by} names only other kernels"
        return ""

    def unmatched(self, records: Iterable[KernelRecord]) -> list[str]:
        """The words that stand for none of *records*."""
        seen = list(records)
        return [word for word in self.wanted + self.unwanted if not any(self._names(r, [word]) for r in seen)]

    @staticmethod
    def _names(record: KernelRecord, words: list[str]) -> bool:
        return record.kernel_id in words or record.name in words
