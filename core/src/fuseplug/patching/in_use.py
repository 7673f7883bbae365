"""Whether the kernels of a model are reached in the first steps of its use, said once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..contract import Target
from ..gains import is_about_size
from ..ranks import rank
from .counting import Calls, Since, counted
from .hooked import describe
from .journal import Patch
from .replacement import replacement_of
from .slots import is_original
from .tally import Count, listeners

_logger = logging.getLogger("fuseplug")

_ENOUGH = 3
"""How many calls of a target are asked for their reason: the first of a step are like the rest."""


@dataclass(frozen=True)
class NotInUse:
    """A fused target whose kernel computed nothing.

    Attributes:
        paths: Where it is. Calls of one function by several modules are counted together.
        target: What was replaced there.
        kernel_id: By which kernel.
        why: What happened instead.
        too_small: Whether that is as it should be, because no call was large enough to gain.
    """

    paths: tuple[str, ...]
    target: Target
    kernel_id: str
    why: str
    too_small: bool = False


class InUse:
    """Looks at the counts of calls after each of the first steps.

    Nothing is added to the calls, but for one step: if kernels were not reached by then, the reasons are asked for, of
    a few calls each.

    Args:
        patches: What is fused.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._since = Since(patches)
        self._looks = 0
        self._asked: dict[int, tuple[Count, int]] = {}
        self._found: list[NotInUse] | None = None

    def look(self, after: int) -> list[NotInUse]:
        """Note that a step is over. Once *after* are, judge, and log what was found; from then on return the same."""
        if self._found is not None:
            return self._found
        self._looks += 1
        if self._looks < after:
            if self._looks == after - 1:
                self._ask()
            return []
        self._stop()
        lost = [*_lost(self._patches)]
        gone = {each.paths[0] for each in lost}
        calls = [each for each in self._since.calls() if not gone.issuperset(each.paths)]
        self._found = [*lost, *_unused(calls, self._traced())]
        if rank() == 0:
            _log(self._found, len(calls) + len(lost))
        return self._found

    def _traced(self) -> set[tuple[str, ...]]:
        """The paths of the targets that were traced: what compiled programs call is not counted."""
        return {
            tuple(patch.path for patch in alike)
            for alike, _ in counted(self._patches)
            if replacement_of(alike[0].function).tally.traced
        }

    def _ask(self) -> None:
        """From now on hear why originals compute the calls of targets whose kernels were never reached."""
        unused = {calls.paths for calls in self._since.calls() if calls.original and not calls.fused}
        for alike, count in counted(self._patches):
            if tuple(patch.path for patch in alike) in unused:
                self._asked[id(count)] = (count, _ENOUGH)
        if self._asked:
            listeners.append(self._heard)

    def _heard(self, count: Count, why: Callable[[], str]) -> None:
        known, left = self._asked.get(id(count), (None, 0))
        if known is None:
            return
        self._since.heard(count, why)
        if left > 1:
            self._asked[id(count)] = (known, left - 1)
        else:
            del self._asked[id(count)]
            if not self._asked:
                self._stop()

    def _stop(self) -> None:
        if self._heard in listeners:
            listeners.remove(self._heard)


def _lost(patches: Sequence[Patch]) -> Iterator[NotInUse]:
    for patch in patches:
        if patch.in_place():
            continue
        if (module := patch.module_ref()) is None:
            why = "its module is gone: another was put in its place, or it was removed; apply_all fuses what is there"
            yield NotInUse((patch.path,), patch.target, patch.kernel_id, why)
            continue
        now = "the class's own again"
        if not is_original(module, patch.target.method):
            now = f"{describe(module, patch.target.method)} now: take that off"
        why = f"its replacement was taken off, and it is {now}; apply_all puts it back"
        yield NotInUse((patch.path,), patch.target, patch.kernel_id, why)


def _unused(found: Sequence[Calls], traced: set[tuple[str, ...]]) -> Iterator[NotInUse]:
    called = any(calls.fused or calls.original for calls in found)
    for calls in found:
        real, too_small = sum(calls.made_real.values()), False
        if calls.fused:
            if real < calls.fused:
                continue
            needed = ", ".join(calls.made_real)
            why = f"all of its {calls.fused} lazy results were computed after all, for {needed}"
        elif calls.original:
            reasons = "; ".join(calls.reasons) or "applied.try_(**batch) says why"
            too_small = bool(calls.reasons) and all(map(is_about_size, calls.reasons))
            why = f"the original computed all of its {calls.original} calls: {reasons}"
        elif calls.paths in traced:
            continue
        elif called:
            why = "it was not called, though others were"
        else:
            why = "no fused module was called: is it this model, or a copy of it, that is run?"
        yield NotInUse(calls.paths, calls.target, calls.kernel_id, why, too_small)


def _log(found: Sequence[NotInUse], count: int) -> None:
    """One warning of all that is wrong, and one line of what is merely too small."""
    small = [each for each in found if each.too_small]
    if wrong := [each for each in found if not each.too_small]:
        _logger.warning(
            "%d of %d fused targets are not in use:\n%s",
            len(wrong),
            count,
            "\n".join(f"  {line}" for line in _lines(wrong)),
        )
    if small:
        _logger.info("%d of %d fused targets had no call that is large enough to gain", len(small), count)


def _lines(found: Sequence[NotInUse]) -> list[str]:
    """A line for all that differ only in the number of their layer."""
    alike: dict[tuple[str, str, str], int] = {}
    for each in found:
        where = re.sub(r"\b\d+\b", "*", f"{each.paths[0] or 'the model'}.{each.target}")
        key = (where, each.kernel_id, each.why)
        alike[key] = alike.get(key, 0) + 1
    return [
        f"{where}{f' ({number} times)' if number > 1 else ''}: {kernel_id}: {why}"
        for (where, kernel_id, why), number in alike.items()
    ]
