"""Counts the calls that the kernels computed and those that the originals computed, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..contract import Target
from .journal import Patch
from .replacement import replacement_of
from .tally import Count, listening


@dataclass(frozen=True)
class Calls:
    """The calls of one target since it was fused. Calls inside programs that were compiled are not counted.

    Attributes:
        paths: Where it is. The calls of one function by several modules are counted together.
        target: What is replaced there.
        kernel_id: By which kernel.
        fused: How many calls the kernel computed.
        original: How many the original did, or PyTorch, where the kernel's function declined.
        made_real: Of those that the kernel computed, how many lazy results were computed after all, by what needed
            their values.
        reasons: Why the original computed them. Only `Applied.try_` collects the reasons.
    """

    paths: tuple[str, ...]
    target: Target
    kernel_id: str
    fused: int
    original: int
    made_real: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.paths[0] or 'the model'}.{self.target}"
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        if not (self.fused or self.original):
            return f"{where}{more}: not called"
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        real = ", ".join(f"{count} for {name}" for name, count in self.made_real.items())
        by_kernel = f"{self.fused} by {self.kernel_id}" + (f" (made real: {real})" if real else "")
        return f"{where}{more}: {by_kernel}, {self.original} by the original{why}"


class Tried(list[Calls]):
    """What came of one batch: the calls of every target.

    Attributes:
        result: What the model returned.
    """

    def __init__(self, calls: Iterable[Calls], result: Any) -> None:
        super().__init__(calls)
        self.result = result

    @property
    def not_reached(self) -> list[Calls]:
        """The targets that were not called, and those with calls that the kernel did not compute to the end."""
        return [calls for calls in self if calls.original or calls.made_real or not calls.fused]

    def __str__(self) -> str:
        reached = len(self) - len(self.not_reached)
        return "\n".join(
            [f"{reached} of {len(self)} targets always came to their kernels", *map(str, self.not_reached)]
        )


def calls_of(patches: Iterable[Patch]) -> list[Calls]:
    """The calls of *patches* so far."""
    return [_calls(alike, count, Count()) for alike, count in counted(patches)]


def tried(patches: Sequence[Patch], run: Callable[[], Any]) -> Tried:
    """The calls of *patches* while *run* runs."""
    since = Since(patches)
    with listening(since.heard):
        result = run()
    return Tried(since.calls(), result)


class Since:
    """The calls of patches from now on.

    Args:
        patches: Whose calls.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        # With the counts themselves: the number of one that is gone may be another's.
        self._before = {id(count): (count, _copy(count)) for _, count in counted(patches)}
        self._reasons: dict[int, dict[str, None]] = {}

    def heard(self, count: Count, why: Callable[[], str]) -> None:
        """Note why the original computed a call: a `Listener`."""
        self._reasons.setdefault(id(count), {})[why()] = None

    def calls(self) -> list[Calls]:
        """The calls, with the reasons that were heard."""
        found = []
        for alike, count in counted(self._patches):
            _, before = self._before.get(id(count), (None, Count()))
            found.append(_calls(alike, count, before, tuple(self._reasons.get(id(count), ()))))
        return found


class Kept:
    """The calls of patches, which can still be asked for when their modules are gone.

    Args:
        patches: Whose calls. They are in place.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._counted = [(_calls(alike, count, Count()), count) for alike, count in counted(patches)]

    def calls(self) -> list[Calls]:
        """The calls since the patches were put on."""
        return [
            replace(calls, fused=count.fused, original=count.original, made_real=dict(count.made_real))
            for calls, count in self._counted
        ]


def _copy(count: Count) -> Count:
    return replace(count, made_real=dict(count.made_real))


def _calls(alike: Sequence[Patch], now: Count, before: Count, reasons: tuple[str, ...] = ()) -> Calls:
    """The calls of patches that are counted together, since *before*."""
    paths = tuple(patch.path for patch in alike)
    real = {why: count - before.made_real.get(why, 0) for why, count in now.made_real.items()}
    real = {why: count for why, count in real.items() if count}
    fused, original = now.fused - before.fused, now.original - before.original
    return Calls(paths, alike[0].target, alike[0].kernel_id, fused, original, real, reasons)


def counted(patches: Iterable[Patch]) -> list[tuple[list[Patch], Count]]:
    """The patches that are counted together, with their count: those on one module, and those of one function."""
    groups: dict[tuple[int, int], tuple[list[Patch], Count]] = {}
    for patch in patches:
        module = patch.module_ref()
        if module is None or patch.target.around:
            continue
        of = module if patch.target.function is None else None
        count = replacement_of(patch.function).tally.of(of)
        groups.setdefault((id(count), id(patch.function)), ([], count))[0].append(patch)
    return [*groups.values()]
