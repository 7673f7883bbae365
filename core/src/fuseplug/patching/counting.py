"""Counts, for each target of a model, the calls that the kernel computed and those that the original computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..contract import Target
from .journal import Patch
from .replacement import replacement_of
from .tally import Count, listening


@dataclass(frozen=True)
class Calls:
    """The calls of one target, since it was fused or in one `Trial`. Calls inside compiled programs are not counted.

    Attributes:
        paths: Where the target's module is.
        target: What is replaced in that module.
        kernel_id: The kernel of the replacement.
        fused: How many calls the kernel computed.
        original: How many calls the original computed, or PyTorch, if the kernel's function declined.
        made_real: How many of the kernel's lazy results were computed after all, by what needed their values.
        reasons: Why the original computed calls. `Applied.try_` collects the reasons, `Applied.calls` does not.
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
        if not (self.fused or self.original):
            return f"{where}: not called"
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        real = ", ".join(f"{count} for {name}" for name, count in self.made_real.items())
        by_kernel = f"{self.fused} by {self.kernel_id}" + (f" (made real: {real})" if real else "")
        return f"{where}: {by_kernel}, {self.original} by the original{why}"


class Trial(list[Calls]):
    """The outcome of one batch: the calls of every target.

    Attributes:
        result: What the model returned.
    """

    def __init__(self, calls: Iterable[Calls], result: Any) -> None:
        super().__init__(calls)
        self.result = result

    @property
    def not_reached(self) -> list[Calls]:
        """The targets without calls, and those with calls by the original or with lazy results that were made real."""
        return [calls for calls in self if calls.original or calls.made_real or not calls.fused]

    def __str__(self) -> str:
        reached = len(self) - len(self.not_reached)
        return "\n".join(
            [f"{reached} of {len(self)} targets always came to their kernels", *map(str, self.not_reached)]
        )


class Counted(NamedTuple):
    """A target and the count of its calls, which outlives the target's module."""

    patch: Patch
    counter: Count

    @property
    def traced(self) -> bool:
        """Whether any calls were traced, or came from outside any module. The count lacks these calls."""
        tally = replacement_of(self.patch.function).tally
        return tally.traced or id(None) in tally.counts

    def calls(self, since: Count | None = None, reasons: Iterable[str] = ()) -> Calls:
        """The calls since *since*, an earlier copy of the count; without it, since the target was fused."""
        before, count = since or Count(), self.counter
        real = {why: number - before.made_real.get(why, 0) for why, number in count.made_real.items()}
        return Calls(
            (self.patch.path,),
            self.patch.target,
            self.patch.kernel_id,
            count.fused - before.fused,
            count.original - before.original,
            {why: number for why, number in real.items() if number},
            tuple(reasons),
        )


def counted(patches: Iterable[Patch]) -> list[Counted]:
    """The targets of *patches* whose modules are alive, each once."""
    targets: dict[int, Counted] = {}
    for patch in patches:
        module = patch.module_ref()
        if module is not None and not patch.target.around:
            count = replacement_of(patch.function).tally.of(module)
            targets[id(count)] = Counted(patch, count)
    return [*targets.values()]


def as_it_is(count: Count) -> Count:
    """A copy of the numbers in *count*, as they are now."""
    return Count(count.fused, count.original, dict(count.made_real))


def tried(patches: Iterable[Patch], run: Callable[[], Any]) -> Trial:
    """The calls of *patches* during one call of *run*, and its result."""
    targets = [(target, as_it_is(target.counter)) for target in counted(patches)]
    reasons: dict[int, dict[str, None]] = {id(target.counter): {} for target, _ in targets}

    def heard(count: Count, why: Callable[[], str]) -> None:
        if id(count) in reasons:
            reasons[id(count)][why()] = None

    with listening(heard):
        result = run()
    return Trial([target.calls(before, reasons[id(target.counter)]) for target, before in targets], result)
