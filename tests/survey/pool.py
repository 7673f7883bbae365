"""Runs tasks in a few processes; one that hangs or dies loses only its current task."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

Work = Callable[[str], dict[str, Any]]


def run(
    tasks: Sequence[str],
    start: Callable[[], Work],
    done: Callable[[str, dict[str, Any]], None],
    jobs: int,
    limit: float,
) -> None:
    """Do *tasks* in *jobs* processes.

    Args:
        tasks: The tasks, in the order in which they are begun.
        start: A module-level function. Each process calls it, and does its tasks with the function that it returns.
        done: Called with each task and its record, by one thread at a time.
        jobs: The number of processes.
        limit: The seconds that a task may take.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    for task in tasks:
        waiting.put(task)
    lock = threading.Lock()

    def tend() -> None:
        with _Worker(start) as worker:
            while True:
                try:
                    task = waiting.get_nowait()
                except Empty:
                    return
                record = worker.do(task, limit)
                with lock:
                    done(task, record)

    threads = [threading.Thread(target=tend) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Worker:
    """A process that does tasks; a new one takes its place when it has ended."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._end(patience=5.0)

    def do(self, task: str, limit: float) -> dict[str, Any]:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._start, theirs), daemon=True)
            self._process.start()
            theirs.close()
        assert self._pipe is not None
        began = time.perf_counter()
        try:
            self._pipe.send(task)
            if self._pipe.poll(limit):
                return self._pipe.recv()
            why = f"took longer than {limit:.0f} s"
        except (EOFError, OSError):
            self._process.join()
            why = f"its process ended with {self._process.exitcode} after {time.perf_counter() - began:.0f} s"
        self._end()
        return {"status": "died", "why": why}

    def _end(self, patience: float = 0.0) -> None:
        if self._process is not None and self._pipe is not None:
            self._pipe.close()
            self._process.join(patience)
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(start: Callable[[], Work], pipe: Connection) -> None:
    work = start()
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(work(pipe.recv()))
