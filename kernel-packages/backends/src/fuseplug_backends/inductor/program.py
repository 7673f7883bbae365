"""A function as a program that Inductor compiles at the first call.

Dynamo is not needed: the functions consist of plain operations on plain tensors, which `make_fx` records as they run.
At each call, Dynamo would compare the state of the process and walk through its own Python. Between the matmuls of an
MLP, which empty the caches, ``silu(gate) * up`` of 64 rows of 3072 took 196 µs by `torch.compile`, and 56 µs by the
code that it had compiled (bfloat16, two x86 cores).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fuseplug.process_lock import ProcessLock

from ..torch_private.inductor import compiled_by_inductor, prepare_recording, recorded
from .rehearsal import Builders, rehearsing
from .vectors import doubt, trust

_compiling = ProcessLock()
R = TypeVar("R")


def in_new_thread(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call *function* in a new thread, which has no modes, no hooks and no autocast, whatever the caller has."""
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(function, *args, **kwargs).result()


class Program:
    """*function*, compiled for the tensors of its first call, and again for sizes that no compilation covers.

    Args:
        function: Takes tensors and returns a tuple of tensors, none of which shares memory with an argument or another.
            It may write to its arguments, but their versions do not count this.
        varying: For each tensor, the dimensions whose sizes may differ from call to call. Sizes of 0 and 1 are compiled
            separately. The caller keeps everything else equal (dtypes, devices, the other sizes and their strides) and
            makes a program for each combination.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], varying: Sequence[Sequence[int]]) -> None:
        self.function, self.varying = function, varying
        self._ready: list[_Compilation] = []
        self._pending: list[_Compilation] = []
        """Compilations that nobody has waited for."""

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Compute *function* without recording anything for a backward."""
        threads = torch.get_num_threads()
        compilation = _covering(self._ready, tensors, threads) or self._missing(tensors, threads)
        if not torch.is_autocast_enabled(compilation.device_type):
            return compilation.run(*tensors)
        with torch.autocast(compilation.device_type, enabled=False):
            return compilation.run(*tensors)

    @property
    def compilations(self) -> int:
        """How often *function* was compiled."""
        return len(self._ready) + len(self._pending)

    def _missing(self, tensors: Sequence[Tensor], threads: int) -> _Compilation:
        """A new compilation for *tensors*, which no ready one covers. In a rehearsal it runs *function* as it is."""
        builders = rehearsing()
        compilation = self._begin(tensors, threads, builders)
        if builders is not None:
            return compilation._replace(run=torch.no_grad()(self.function))
        try:
            compilation.wait()
        except Exception:  # noqa: BLE001 - a compiler's failure may raise anything
            self._drop(compilation)
            doubt()
            compilation = self._begin(tensors, threads, None)
        with _compiling:
            if self._drop(compilation):  # another thread may have waited, too
                self._ready = [*self._ready, compilation]
        return compilation

    def _begin(self, tensors: Sequence[Tensor], threads: int, builders: Builders | None) -> _Compilation:
        with _compiling:
            # Another thread may have been first.
            compilation = _covering([*self._ready, *self._pending], tensors, threads)
            if compilation is None:
                prepare_recording()
                compilation = in_new_thread(
                    _compilation_of, self.function, self.varying, tensors, threads=threads, builders=builders
                )
                self._pending = [*self._pending, compilation]
        return compilation

    def _drop(self, compilation: _Compilation) -> bool:
        """Remove *compilation* from the pending ones; return whether it was among them."""
        with _compiling:
            others = [pending for pending in self._pending if pending is not compilation]
            was_pending = len(others) < len(self._pending)
            self._pending = others
        return was_pending


class _Compilation(NamedTuple):
    """One compilation.

    Attributes:
        threads: How many threads it uses on a CPU.
        covers: Tells whether it is right for the sizes of given tensors.
        run: The compiled function.
        wait: Waits until *run* is built.
        device_type: The type of the device that it runs on.
    """

    threads: int
    covers: Callable[..., bool]
    run: Callable[..., Sequence[Tensor]]
    wait: Callable[[], None]
    device_type: str


def _covering(compilations: Sequence[_Compilation], tensors: Sequence[Tensor], threads: int) -> _Compilation | None:
    for compilation in compilations:
        if compilation.threads == threads and compilation.covers(*tensors):
            return compilation
    return None


@torch.no_grad()
def _compilation_of(
    function: Callable[..., tuple[Tensor, ...]],
    varying: Sequence[Sequence[int]],
    tensors: Sequence[Tensor],
    *,
    threads: int,
    builders: Builders | None,
) -> _Compilation:
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
    return _Compilation(threads, recording.covers(), run=run, wait=wait, device_type=device_type)
