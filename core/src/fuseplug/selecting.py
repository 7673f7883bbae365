"""The kernels that a user's words stand for, and those of them that take part."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from .contract import Mode
from .discovery import KernelRecord
from .errors import DiscoveryError


def names_in(value: str | Sequence[str]) -> tuple[str, ...]:
    """*value*, one name or several."""
    return (value,) if isinstance(value, str) and value else tuple(value)


def select(
    records: Sequence[KernelRecord], include: Sequence[str] | str | None, unwanted: Sequence[str], mode: Mode
) -> list[KernelRecord]:
    """Those of *records* that are ready, that *include* names, that are not *unwanted*, and that serve *mode*."""
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
                f"kernel {record.name} was asked for by name, but is {record.state}: {record.reason}", record=record
            )
    named = by_id or [record for record in records if record.kernel and record.kernel.op == word]
    if not named:
        known = sorted({r.kernel_id for r in records} | {r.kernel.op for r in records if r.kernel})
        raise DiscoveryError(_unknown(word, known), word=word)
    return named


def _unknown(word: str, known: Sequence[str]) -> str:
    if not known:
        return f"no kernel or op {word!r} is installed, nor any other: pip install fuseplug-rmsnorm, for one"
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.4)
    others = f"nearest installed: {', '.join(near)}" if near else f"installed: {', '.join(known)}"
    return f"no kernel or op {word!r} is installed; {others} (see `fuseplug list`)"
