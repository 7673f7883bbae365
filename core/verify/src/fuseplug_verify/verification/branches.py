"""Records which way each branch of a forward took, in all its runs."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterable
from typing import Any

Span = tuple[int, int, int, int]
"""Line and column where it begins, and where it ends."""

Position = tuple[int | None, int | None, int | None, int | None]


class Branches:
    """Records both ways of every conditional jump. Use it as a context around each run of the original, then `keep`.

    An existing tracer, of a debugger or a coverage tool, is restored afterwards.

    Args:
        codes: The code objects to record.
    """

    def __init__(self, codes: Iterable[types.CodeType]) -> None:
        self._taken: dict[types.CodeType, dict[int, set[int]]] = {}
        for code in codes:
            jumps = [i.offset for i in dis.get_instructions(code) if "JUMP" in i.opname and "IF" in i.opname]
            self._taken[code] = {offset: set() for offset in jumps}
        self._last: dict[int, int] = {}
        self._new: list[tuple[types.CodeType, int, int]] = []
        self._before: Any = None

    def __enter__(self) -> None:
        self._new.clear()
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def keep(self) -> None:
        """Keep what the last run took, because its result could be compared and was the same."""
        for code, jump, to in self._new:
            self._taken[code][jump].add(to)
        self._new.clear()

    def one_sided(self, file: str, span: Span) -> bool:
        """Whether a jump within *span* of the source in *file* was taken, or passed, at every visit.

        Code that was never visited does not count: the branch that leads to it is then one-sided itself.
        """
        return any(
            len(ways) == 1 and _within(position, span)
            for code, jumps in self._taken.items()
            if code.co_filename == file
            for ways, position in zip(jumps.values(), _positions(code, jumps), strict=True)
        )

    def _call(self, frame: Any, _event: str, _arg: Any) -> Any:
        if frame.f_code not in self._taken:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: Any, event: str, _arg: Any) -> Any:
        if event == "opcode":
            jumps, last = self._taken[frame.f_code], self._last.get(id(frame))
            if last in jumps:
                self._new.append((frame.f_code, last, frame.f_lasti))
            self._last[id(frame)] = frame.f_lasti
        elif event == "return":
            self._last.pop(id(frame), None)
        return self._step


def _positions(code: types.CodeType, offsets: Iterable[int]) -> list[Position]:
    """Where in the source the instructions at *offsets* come from."""
    of_instructions = [*code.co_positions()]
    positions = [of_instructions[offset // 2] for offset in offsets]
    return [(line, column, end_line, end_column) for line, end_line, column, end_column in positions]


def _within(position: Position, span: Span) -> bool:
    """Whether *position* lies in *span*, as far as both are known: ``python -X no_debug_ranges`` knows lines alone."""
    line, column, end_line, end_column = position
    if line is None or end_line is None:
        return False
    if column is None or end_column is None:
        return span[0] <= line and end_line <= span[2]
    return span[:2] <= (line, column) and (end_line, end_column) <= span[2:]
