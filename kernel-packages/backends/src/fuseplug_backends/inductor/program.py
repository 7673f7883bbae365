"""A function as a program that Inductor compiles when it is first called.

Dynamo is not asked: what is compiled here is plain operations on plain tensors, which `make_fx` records as they run.
At each call Dynamo would compare the state of the process and walk through its own Python. Between the matmuls of an
MLP, which empty the caches, ``silu(gate) * up`` of 64 rows of 3072 took 196 µs by `torch.compile` and 56 µs by what it
had compiled (bfloat16, two x86 cores).
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug.process_lock import ProcessLock

from ..torch_private.inductor import compiled_by_inductor, prepare_recording, recorded
from .rehearsal import Builders, rehearsing
from .vectors import doubt, trust

_compiling = ProcessLock()
_serial = itertools.count(1)


class Program:
    """*function*, compiled for the tensors of its first call, and again for sizes that this does not cover.

    Args:
        function: Takes tensors and returns a tuple of tensors. It may write to its arguments.
        varying: For each tensor the dimensions whose sizes may differ from call to call. Sizes of 0 and 1 have programs
            of their own. All else, which is dtypes, devices, the other sizes and their strides, is the caller's to keep
            equal: it makes a program for each combination.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], varying: Sequence[Sequence[int]]) -> None:
        self.function, self.varying = function, varying
        self._made: list[_Made] = []
        self._begun: list[_Made] = []

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Compute *function* and record nothing for a backward."""
        threads = torch.get_num_threads()
        made = _covering(self._made, tensors, threads) or self._missing(tensors, threads)
        if not torch.is_autocast_enabled(made.device_type):
            return made.run(*tensors)
        with torch.autocast(made.device_type, enabled=False):
            return made.run(*tensors)

    @property
    def compilations(self) -> int:
        """How often *function* was compiled."""
        return len(self._made) + len(self._begun)

    def _missing(self, tensors: Sequence[Tensor], threads: int) -> _Made:
        """What computes *function* for *tensors* now, where nothing that was made before does."""
        builders = rehearsing()
        begun = self._begin(tensors, threads, builders)
        if builders is not None:
            return begun._replace(run=torch.no_grad()(self.function))
        try:
            begun.wait()
        except Exception:  # noqa: BLE001 - whatever a compiler's failure raises
            self._drop(begun)
            doubt()
            begun = self._begin(tensors, threads, None)
        with _compiling:
            if self._drop(begun):  # another thread may have waited, too
                self._made = [*self._made, begun]
        return begun

    def _begin(self, tensors: Sequence[Tensor], threads: int, builders: Builders | None) -> _Made:
        with _compiling:
            begun = _covering([*self._made, *self._begun], tensors, threads)  # another thread may have been first
            if begun is None:
                prepare_recording()
                # A new thread has no modes, no hooks and no autocast, whatever the caller has.
                with ThreadPoolExecutor(1) as elsewhere:
                    begun = elsewhere.submit(_make, self.function, self.varying, tensors, threads, builders).result()
                self._begun = [*self._begun, begun]
        return begun

    def _drop(self, begun: _Made) -> bool:
        """Whether *begun* was among those that nobody has waited for. It is no more."""
        with _compiling:
            others = [each for each in self._begun if each is not begun]
            was_there = len(others) < len(self._begun)
            self._begun = others
        return was_there


class _Made(NamedTuple):
    """One compilation.

    Attributes:
        threads: How many it uses on a CPU.
        covers: Whether it is right for tensors of these sizes.
        run: The compiled function.
        wait: Waits until *run* is built.
        device_type: Where it runs.
    """

    threads: int
    covers: Callable[..., bool]
    run: Callable[..., Sequence[Tensor]]
    wait: Callable[[], None]
    device_type: str


def _covering(made: Sequence[_Made], tensors: Sequence[Tensor], threads: int) -> _Made | None:
    for each in made:
        if each.threads == threads and each.covers(*tensors):
            return each
    return None


@torch.no_grad()
def _make(
    function: Callable[..., tuple[Tensor, ...]],
    varying: Sequence[Sequence[int]],
    tensors: Sequence[Tensor],
    threads: int,
    builders: Builders | None,
) -> _Made:
    device_type = tensors[0].device.type
    trust(device_type)
    if builders is not None:
        builders.prepare()
    recording = recorded(function, tensors, varying)
    try:
        run, wait = compiled_by_inductor(recording, None if builders is None else builders.begin)
    except Exception:
        if not doubt():
            raise
        recording = recorded(function, tensors, varying)
        run, wait = compiled_by_inductor(recording)
    return _Made(threads, recording.covers(), run, wait, device_type)


def named(function: Callable[..., Any], formula: Callable[..., Any]) -> Callable[..., Any]:
    """*function* with a code object and a name that no other has, for kernels that call `torch.compile` themselves.

    Dynamo counts recompilations by code object, and remembers by file, line and name which sizes were seen to vary:
    under one name, the width would be one.

    Args:
        function: What is compiled.
        formula: What it computes; named in what the compiler says of it.
    """
    name = f"{formula.__name__}_{function.__name__}_{next(_serial)}"
    return types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, name, closure=function.__closure__
    )
