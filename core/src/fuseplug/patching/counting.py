"""The calls that the kernels computed and those that the originals computed, of each target of a model."""

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
    """The calls of one target since it was fused. Calls inside programs that were compiled are not counted.

    Attributes:
        paths: Where its module is.
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
        if not (self.fused or self.original):
            return f"{where}: not called"
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        real = ", ".join(f"{count} for {name}" for name, count in self.made_real.items())
        by_kernel = f"{self.fused} by {self.kernel_id}" + (f" (made real: {real})" if real else "")
        return f"{where}: {by_kernel}, {self.original} by the original{why}"


class Trial(list[Calls]):
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


class Counted(NamedTuple):
    """A target, and where its calls are counted, also when its module is gone."""

    patch: Patch
    counter: Count

    @property
    def traced(self) -> bool:
        """Whether calls were traced, or came from outside any module: such calls are not counted."""
        tally = replacement_of(self.patch.function).tally
        return tally.traced or id(None) in tally.counts

    def calls(self, since: Count | None = None, reasons: Iterable[str] = ()) -> Calls:
        """The calls since *since*, a copy of the count; since the target was fused if there is none."""
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
    """A copy of *count* that nothing is added to."""
    return Count(count.fused, count.original, dict(count.made_real))


def tried(patches: Iterable[Patch], run: Callable[[], Any]) -> Trial:
    """The calls of *patches* while *run* runs."""
    targets = [(target, as_it_is(target.counter)) for target in counted(patches)]
    reasons: dict[int, dict[str, None]] = {id(target.counter): {} for target, _ in targets}

    def heard(count: Count, why: Callable[[], str]) -> None:
        if id(count) in reasons:
            reasons[id(count)][why()] = None

    with listening(heard):
        result = run()
    return Trial([target.calls(before, reasons[id(target.counter)]) for target, before in targets], result)
