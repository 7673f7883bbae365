"""Checks of a run besides its result: its memory, its effect on the process, repetition, threads."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fuseplug_verify import Example, Outcome, neutral

from .attempts import Raised, attempt
from .importing.process_state import ProcessState
from .results import Finding
from .subjects import Case

RUNS = 3
"""How often a kernel must give the same result."""

THREADS = 4

PATIENCE = 10
"""How often to look whether memory is free: autograd's thread for a device frees it a moment after it has answered."""


def memory(case: Case) -> Iterator[Finding]:
    """The kernel reads no memory before it is written, and its result shares no memory with its inputs."""
    for size in case.edge_sizes:
        where = f"every new tensor full of NaN, {size} elements"
        yield case.compare(where, case.example(size=size), surroundings=_poisoned)
    ours, theirs = (_shared(outcome(case.example())) for outcome in (case.kernel_on, case.original_on))
    shared = sorted(ours - theirs)
    yield Finding("", fault=f"its result lies in the memory of {', '.join(shared)}" if shared else "")


def references(case: Case) -> Iterator[Finding]:
    """The memory of a call is freed once the call and its result are gone."""
    for size in case.repeated_sizes:
        for held in [_held(case, size) for _ in range(2)]:
            kept = _still_there(held)
            where = f"{size} elements"
            yield Finding(where, fault=f"the memory of {', '.join(kept)} is held after the call" if kept else "")
            if kept:  # waiting again takes long
                return


def _still_there(held: dict[str, Any]) -> list[str]:
    for look in range(PATIENCE):
        if all(storage.expired() for storage in held.values()):
            return []
        if look:
            time.sleep(0.05)
        if look in (0, PATIENCE - 1):  # takes half a second in a process that has compiled something
            gc.collect()
    return sorted(name for name, storage in held.items() if not storage.expired())


def determinism(case: Case) -> Iterator[Finding]:
    """The bits are the same every time if torch is set to be deterministic; if not, a difference is only mentioned."""
    for size in case.repeated_sizes:
        example, where = case.example(size=size), f"{RUNS} runs, {size} elements"
        for asked in (True, False):
            with _deterministic() if asked else contextlib.nullcontext():
                first, *more = [case.kernel_on(example) for _ in range(RUNS)]
            why = next(filter(None, (again.difference(first) for again in more)), "")
            if asked or not why:
                yield Finding(where, fault=f"not the same each time: {why}" if why else "")
            else:
                unless = "not the same each time unless torch.use_deterministic_algorithms(True) was called"
                yield Finding(where, skipped=f"{unless}: {why.partition(' by ')[0]}")


def threads(case: Case) -> Iterator[Finding]:
    """Several threads at once get the same results as one thread."""
    sizes = [size for size in (*case.edge_sizes, min(case.sizes)) if not case.random(size)]
    if not sizes:
        yield Finding("", skipped="the original draws random numbers, which threads draw in no fixed order")
    for size in sizes[: len(case.edge_sizes)]:
        where = f"{THREADS} threads at once, {size} elements"
        examples = [case.example(size=size, number=number) for number in range(THREADS)]
        for example, outcome in zip(examples, _at_once(case, examples), strict=True):
            if isinstance(outcome, Raised):
                yield Finding(where, fault=f"raises {outcome}")
            else:
                why = case.excess(outcome, case.original_on(example), case.truth_on(example))
                yield Finding(where, fault=f"not what one thread gets: {why}" if why else "")


def _at_once(case: Case, examples: Sequence[Example]) -> list[Outcome | Raised]:
    together = threading.Barrier(len(examples))

    def work(example: Example) -> Outcome | Raised:
        together.wait()
        return attempt(lambda: case.kernel_on(example))

    with ThreadPoolExecutor(len(examples)) as pool:
        return list(pool.map(work, examples))


def process_state(case: Case) -> Iterator[Finding]:
    """A run changes nothing of the process: settings, random state, what names stand for."""
    with neutral(case.device.type, dtype=None, random_kept=True):
        # draws=False, because otherwise the run would restore the random state and hide that the kernel changed it.
        yield from _left_behind(replace(case, subject=replace(case.subject, draws=False)))


def _left_behind(case: Case) -> Iterator[Finding]:
    _draw()
    state, start = ProcessState(), torch.default_generator.get_state()
    for number in range(2):
        example = case.example(number=number)
        torch.default_generator.set_state(start)
        case.original_on(example)
        theirs = torch.default_generator.get_state()
        torch.default_generator.set_state(start)
        case.kernel_on(example)
        drawn = not torch.equal(torch.default_generator.get_state(), theirs)
        yield Finding("", fault="it does not draw the same random numbers as the original" if drawn else "")
    # The original may draw from torch's generator; the comparison is above.
    changed = [what for what in state.changed() if not what.startswith("torch's random state")]
    for what in dict.fromkeys([*changed, *case.examined.before.lastingly_changed()]) or [""]:
        yield Finding("", fault=what)


def _draw() -> None:
    """Move the generators on: a kernel that seeds them, and has done so before, would otherwise not change them."""
    torch.rand(())
    random.random()  # noqa: S311 - not for secrets
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.random()


@contextlib.contextmanager
def _deterministic(*, poisoned: bool = False) -> Iterator[None]:
    """Ask torch for deterministic algorithms; if *poisoned*, it fills new tensors with NaN, as is then its default."""
    filling: Any = torch.utils.deterministic
    was = torch.are_deterministic_algorithms_enabled()
    warned, filled = torch.is_deterministic_algorithms_warn_only_enabled(), filling.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        filling.fill_uninitialized_memory = poisoned
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was, warn_only=warned)
            filling.fill_uninitialized_memory = filled


_poisoned = functools.partial(_deterministic, poisoned=True)


def _shared(outcome: Outcome) -> set[str]:
    tensors = {name: value for name, value in outcome.values.items() if value is not None and value.numel()}
    outputs = {_address(value) for name, value in tensors.items() if name.startswith("output")}
    return {
        name.removesuffix(" afterwards")
        for name, value in tensors.items()
        if name.endswith(" afterwards") and _address(value) in outputs
    }


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _held(case: Case, size: int) -> dict[str, Any]:
    outcome = case.kernel_on(case.example(size=size))
    return {
        name: StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
        for name, value in outcome.values.items()
        if value is not None and value.numel()
    }
