"""The report on a plan, for people and for machines."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..contract import Mode, Rejection, Target
from ..discovery.records import KernelRecord
from .plain_text import one_line, printable, some_lines
from .tables import UNLIMITED, empty_table, with_whole_words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

CheckStatus = Literal["passed", "passed before", "pending", "skipped", ""]


class Measurement(Protocol):
    """The measurement of a kernel in one call, formatted by the code that measured it."""

    def __str__(self) -> str:
        """The measurement in one line, for people."""

    def to_dict(self) -> dict[str, Any]:
        """The measurement as plain data."""


@dataclass(frozen=True)
class Entry:
    """The answer for one target of one site.

    Attributes:
        paths: The paths of the module; several if it is shared.
        class_name: The class of the module.
        device_type: The type of device on which the module was planned to run.
        op: What the module computes, if a kernel answered for it.
        target: What would be replaced; ``None`` if no kernel proposed anything.
        kernel_id: The kernel that was chosen; ``None`` if the target is left alone.
        variant: The variant that the target was found to be.
        watched: What the guard compares at each call, besides the call itself.
        check: What is known about the kernel on that device: ``"passed"``; ``"passed before"`` (in another process,
            and nothing that the check depends on has changed since); ``"pending"`` (the device is not there yet);
            ``"skipped"`` (``verify=False``).
        rejections: Pairs of a kernel that was not chosen and the reason.
        outranked: Kernels that also fit, but were not preferred.
        covered_by: The path of the site whose replacement no longer calls this module.
        gives_up: What the user agreed to give up with the kernel.
        gains_from: The number of elements of the main input from which on the kernel is used, by kind of call
            (``"bfloat16 training"``). The original computes smaller calls, or all calls if the number is ``None``.
            Empty if the kernel computes calls of every size.
        figures: The measurements of the kernel, with ``measure=``.
        gains_until: The number of elements up to which the kernel is used, too, for kinds of calls that have one.
    """

    paths: tuple[str, ...]
    class_name: str
    device_type: str
    op: str = ""
    target: Target | None = None
    kernel_id: str | None = None
    variant: str = ""
    check: CheckStatus = ""
    watched: tuple[str, ...] = ()
    rejections: tuple[tuple[str, Rejection], ...] = ()
    outranked: tuple[str, ...] = ()
    covered_by: str = ""
    gives_up: str = ""
    gains_from: Mapping[str, int | None] = field(default_factory=dict)
    figures: tuple[Measurement, ...] = ()
    gains_until: Mapping[str, int] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        """Whether a kernel was chosen."""
        return self.kernel_id is not None

    @property
    def why_not(self) -> str:
        """Why the target is left alone, in a sentence; ``""`` if it is not."""
        if self.fused:
            return ""
        if self.covered_by:
            return f"no longer called: covered by {self.covered_by}"
        return "; ".join(f"{kernel}: {rejection.reason}" for kernel, rejection in self.rejections)

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data."""
        return {
            "paths": list(self.paths),
            "class": self.class_name,
            "device_type": self.device_type,
            "op": self.op,
            "target": str(self.target) if self.target else None,
            "kernel": self.kernel_id,
            "variant": self.variant,
            "check": self.check,
            "watched": list(self.watched),
            "rejections": [{"kernel": k, "kind": r.kind, "reason": r.reason} for k, r in self.rejections],
            "outranked": list(self.outranked),
            "covered_by": self.covered_by,
            "gives_up": self.gives_up,
            "gains_from": dict(self.gains_from),
            "gains_until": dict(self.gains_until),
            "figures": [figure.to_dict() for figure in self.figures],
        }


@dataclass(frozen=True)
class Report:
    """What is fused, what is not, and why. Print it, or use `to_dict`.

    Attributes:
        model_class: The class of the model.
        mode: The mode for which the model was planned.
        entries: The answer for every target of every site for which any kernel answered.
        records: Every kernel that is installed, whatever its state.
        idle: For each kernel that was ready but answered for no site, the reason.
        notes: What else a person should know.
        seconds: How long planning and checking took, compilation not included.
        compile_seconds: How long the kernels took to compile.
        measure_seconds: How long it took to run the model and time the kernels, with ``measure=``.
        raised: For each kernel that raised when it was asked about a site, what it raised, and where.
        device_types: The types of device on which the modules of the model were planned to run.
        applied: Whether the plan was applied. If not, the report says what would be fused.
    """

    model_class: str
    mode: Mode
    entries: Sequence[Entry]
    records: Sequence[KernelRecord] = ()
    idle: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    seconds: float = 0.0
    compile_seconds: float = 0.0
    measure_seconds: float = 0.0
    raised: Mapping[str, str] = field(default_factory=dict)
    device_types: Sequence[str] = ()
    applied: bool = True

    @property
    def fused(self) -> list[Entry]:
        """The targets for which a kernel was chosen."""
        return [entry for entry in self.entries if entry.fused]

    @property
    def left_alone(self) -> list[Entry]:
        """The targets for which no kernel was chosen; `Entry.why_not` says why."""
        return [entry for entry in self.entries if not entry.fused]

    @property
    def gives_up(self) -> list[str]:
        """What the user gives up with the chosen kernels, each sentence once."""
        return list(dict.fromkeys(entry.gives_up for entry in self.fused if entry.gives_up))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data that `json` can write."""
        return {
            "model": self.model_class,
            "mode": self.mode,
            "applied": self.applied,
            "gives_up": self.gives_up,
            "fused": len(self.fused),
            "left_alone": len(self.left_alone),
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "measure_seconds": self.measure_seconds,
            "entries": [entry.to_dict() for entry in self.entries],
            "kernels": [record.to_dict() for record in self.records],
            "idle": dict(self.idle),
            "raised": dict(self.raised),
            "notes": list(self.notes),
        }

    def summary(self) -> str:
        """The report, summed up in one line."""
        devices = ", ".join(sorted({entry.device_type for entry in self.entries}) or self.device_types)
        took = f"planned and checked in {self.seconds:.2f} s"
        if self.compile_seconds >= 0.01:
            took += f", kernels compiled in {self.compile_seconds:.1f} s"
        if self.measure_seconds:
            took += f", measured in {self.measure_seconds:.1f} s"
        targets = "target" if len(self.entries) == 1 else "targets"
        counted = f"{len(self.fused)} of {len(self.entries)} {targets} {self._fused}"
        return f"{self.model_class}: {counted} for {self.mode}{f' on {devices}' if devices else ''}; {took}"

    @property
    def _fused(self) -> str:
        return "fused" if self.applied else "would be fused"

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=120, color_system=None, legacy_windows=False).print(self)
        return printable("\n".join(line.rstrip() for line in out.getvalue().splitlines()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        width = options.max_width
        yield from (Text(f"as you allowed: {one_line(sentence)}") for sentence in self.gives_up)
        yield Text(one_line(self.summary()))
        fused: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
        for entry in self.fused:
            where = f"{entry.check} on {entry.device_type}" if entry.check.startswith("passed") else entry.check
            # Two lines in a cell: side by side, the names would leave no room for the paths.
            names = map(one_line, (entry.kernel_id, entry.variant, entry.class_name, entry.target))
            kernel_id, variant, class_name, target = names
            key = (f"{kernel_id}\n{variant}", f"{class_name}\n{target}", where)
            fused[key].append(entry)
        yield from _table(self._fused, ("kernel\nvariant", "class\ntarget", "kernel check"), fused, width)
        alone: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
        for entry in self.left_alone:
            covered = "no longer called: its parent is fused" if entry.covered_by else entry.why_not
            alone[one_line(entry.op), one_line(entry.class_name), covered].append(entry)
        yield from _table("left alone", ("op", "class", "why"), alone, width)
        passed_over: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
        for entry in self.fused:
            others = [(kernel, why.reason) for kernel, why in entry.rejections if kernel not in self.raised]
            for kernel, why in [*others, *((kernel, f"outranked by {entry.kernel_id}") for kernel in entry.outranked)]:
                passed_over[one_line(kernel), one_line(entry.class_name), why].append(entry)
        yield from _table("passed over", ("kernel", "class", "why"), passed_over, width)
        yield from _kernels([r for r in self.records if r.state != "ready"], self.raised, self.idle, width)
        yield from (Text(f"note: {one_line(note)}") for note in self.notes)


_WIDE = 110
"""Below this width, in characters, the columns of names are stacked in one, to leave room for paths and reasons."""


def _table(
    title: str, columns: Sequence[str], rows: Mapping[tuple[str, ...], Sequence[Entry]], width: int
) -> Iterable[Any]:
    if rows:
        narrow, names = width < _WIDE, len(columns) - (columns[-1] == "why")
        table = _empty(title, columns[:names], width)
        if names < len(columns):
            table.add_column("why", ratio=2, overflow="fold")
        table.add_column("sites", justify="right", no_wrap=True)
        table.add_column(
            "where", overflow="fold", **({"ratio": 1} if names == len(columns) else {"max_width": width // 3})
        )
        for cells, entries in rows.items():
            table.add_row(*_cells(cells[:names], narrow), *_cells([*cells[names:], str(len(entries)), _where(entries)]))
        yield with_whole_words(table, width, ("why",))


def _kernels(
    records: Sequence[KernelRecord], raised: Mapping[str, str], idle: Mapping[str, str], width: int
) -> Iterable[Any]:
    narrow = width < _WIDE
    if records or raised or idle:
        rows: list[tuple[tuple[str, ...], str]] = [((r.kernel_id, r.distribution, r.state), r.reason) for r in records]
        rows += [((kernel_id, "", "broken"), why) for kernel_id, why in raised.items()]
        rows += [((kernel_id, "", "idle"), why) for kernel_id, why in idle.items()]
        table = _empty("kernels not taking part", ("kernel", "distribution", "state"), width)
        table.add_column("why", ratio=1, overflow="fold")
        for names, why in rows:
            table.add_row(*_cells([name for name in names if name or not narrow], narrow), *_cells([why]))
        yield with_whole_words(table, width, ("why",))


def _cells(cells: Sequence[str], stacked: bool = False) -> list[Any]:
    # Text, because rich would read the brackets of "pip install x[npu]" in a string as markup.
    from rich.text import Text

    safe = [some_lines(cell) for cell in cells]
    return [Text("\n".join(safe))] if stacked else [Text(cell) for cell in safe]


def _empty(title: str, columns: Sequence[str], width: int) -> Any:
    names = ["\n".join(columns)] if width < _WIDE else columns
    return empty_table(*names, title=title, expand=width < UNLIMITED)


def _where(entries: Sequence[Entry], most: int = 3) -> str:
    """The paths. Stars replace numbers where this lets several paths share a line, as those of all layers do."""
    alike: dict[str, list[str]] = defaultdict(list)
    for path in (one_line(entry.paths[0]) or "(the model)" for entry in entries):
        alike[re.sub(r"\b\d+\b", "*", path)].append(path)
    shapes = [paths[0] if len(paths) == 1 else shape for shape, paths in alike.items()]
    rest = [f"and {len(shapes) - most} more"] if len(shapes) > most else []
    return "\n".join([*shapes[:most], *rest])
