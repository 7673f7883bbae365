"""Records which ways each branch of a forward took in all its runs."""

from __future__ import annotations

import dis
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Jumped = Callable[[types.CodeType, int, int], None]
"""Is called at each jump, with the code, the offset of the jump, and the offset of the instruction that runs next."""

Span = tuple[int, int, int, int]
"""The line and column of the beginning, then those of the end."""

Position = tuple[int | None, int | None, int | None, int | None]


class Branches:
    """Records the ways that every conditional jump took. Enter it around each run of the original, then call `keep`.

    Only what this thread runs is recorded. Debuggers and coverage tools go on as before.

    Args:
        codes: The code objects to record.
    """

    def __init__(self, codes: Iterable[types.CodeType]) -> None:
        self._jumps = {code: {offset: (tested, set[int]()) for offset, tested in _jumps(code)} for code in codes}
        self._new: list[tuple[types.CodeType, int, int]] = []
        self._watching = ExitStack()

    def __enter__(self) -> None:
        self._new.clear()
        watching = monitored if sys.version_info >= (3, 12) else traced
        self._watching.enter_context(watching(self._jumps, self._jumped))

    def __exit__(self, *_: object) -> None:
        self._watching.close()

    def _jumped(self, code: types.CodeType, offset: int, to: int) -> None:
        if offset in self._jumps[code]:
            self._new.append((code, offset, to))

    def keep(self) -> None:
        """Keep the ways that the last run took, because its result could be compared and was the same."""
        for code, jump, to in self._new:
            self._jumps[code][jump][1].add(to)
        self._new.clear()

    def one_sided(self, file: str, span: Span) -> bool:
        """Whether a jump within *span* of the source in *file* went the same way at every visit.

        Code that was never visited does not count: the branch that leads to it is then one-sided itself.
        """
        return any(
            len(ways) == 1 and _within(tested, span)
            for code, jumps in self._jumps.items()
            if code.co_filename == file
            for tested, ways in jumps.values()
        )


@contextmanager
def monitored(codes: Collection[types.CodeType], jumped: Jumped) -> Iterator[None]:
    """Call *jumped* at each jump of *codes*. From Python 3.12 on, a tracer misses the first run of a code object."""
    tools, thread = sys.monitoring, threading.get_ident()  # type: ignore[attr-defined]
    tool = next(number for number in range(6) if tools.get_tool(number) is None)

    def branch(code: types.CodeType, offset: int, to: int) -> None:
        if threading.get_ident() == thread:
            jumped(code, offset, to)

    tools.use_tool_id(tool, "fuseplug-verify")
    tools.register_callback(tool, tools.events.BRANCH, branch)
    try:
        for code in codes:
            tools.set_local_events(tool, code, tools.events.BRANCH)
        yield
    finally:
        for code in codes:
            tools.set_local_events(tool, code, tools.events.NO_EVENTS)
        tools.register_callback(tool, tools.events.BRANCH, None)
        tools.free_tool_id(tool)


@contextmanager
def traced(codes: Collection[types.CodeType], jumped: Jumped) -> Iterator[None]:
    """Call *jumped* at each instruction of *codes*: for Python 3.11."""
    before, last = sys.gettrace(), dict[int, int]()

    def call(frame: Any, _event: str, _arg: Any) -> Any:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def step(frame: Any, event: str, _arg: Any) -> Any:
        if event == "opcode":
            if id(frame) in last:
                jumped(frame.f_code, last[id(frame)], frame.f_lasti)
            last[id(frame)] = frame.f_lasti
        elif event == "return":
            last.pop(id(frame), None)
        return step

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def _jumps(code: types.CodeType) -> Iterator[tuple[int, Position]]:
    """Yield the offset of each conditional jump, and the source position of its test, from the instruction before it.

    For the jump itself, Python 3.11 gives the position of a whole ``if``.
    """
    tested: Position = (None, None, None, None)
    for instruction in dis.get_instructions(code):
        if "JUMP" in instruction.opname and "IF" in instruction.opname:
            yield instruction.offset, tested
        elif instruction.opname != "EXTENDED_ARG" and (at := instruction.positions) is not None:
            tested = at.lineno, at.col_offset, at.end_lineno, at.end_col_offset


def _within(position: Position, span: Span) -> bool:
    """Whether *position* lies in *span*, as far as is known: with ``python -X no_debug_ranges``, only lines are."""
    line, column, end_line, end_column = position
    if line is None or end_line is None:
        return False
    if column is None or end_column is None:
        return span[0] <= line and end_line <= span[2]
    return span[:2] <= (line, column) and (end_line, end_column) <= span[2:]
