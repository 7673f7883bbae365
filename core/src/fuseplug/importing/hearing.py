"""Keeps what the importing thread prints from the screen, and tells what it was."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any


class _Ear:
    """Stands in for a stream. What other threads write, and what is written later, goes through."""

    def __init__(self, stream: Any, text: list[str]) -> None:
        self._stream = stream
        self._text: list[str] | None = text
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if self._text is None or threading.get_ident() != self._thread:
            return int(self._stream.write(text))
        self._text.append(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def close_off(self) -> None:
        self._text = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The texts that this thread writes to ``sys.stdout`` and ``sys.stderr`` within, which are not shown.

    What is written to the file descriptors is neither heard nor kept back.
    """
    text: list[str] = []
    streams = sys.stdout, sys.stderr
    ears: list[Any] = [_Ear(stream, text) if stream is not None else None for stream in streams]
    sys.stdout, sys.stderr = ears
    try:
        yield text
    finally:
        sys.stdout, sys.stderr = streams
        for ear in ears:
            if ear is not None:
                ear.close_off()
