"""A function as a program that Inductor compiles when it is first called.

Dynamo is not asked: what is compiled here is plain operations on plain tensors, which `make_fx` records as they run.
At each call Dynamo would compare the state of the process and walk through its own Python. Between the matmuls of an
MLP, which empty the caches, ``silu(gate) * up`` of 64 rows of 3072 took 196 µs by `torch.compile` and 56 µs by what it
had compiled (bfloat16, two x86 cores).
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_private import compiled_by_inductor, recorded, widest_vectors_work

_compiling = threading.RLock()
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

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Compute *function* and record nothing for a backward."""
        threads = torch.get_num_threads()
        made = self._covering(tensors, threads) or self._make(tensors, threads)
        device_type = tensors[0].device.type
        if not torch.is_autocast_enabled(device_type):
            return made.run(*tensors)
        with torch.autocast(device_type, enabled=False):
            return made.run(*tensors)

    @property
    def compilations(self) -> int:
        """How often *function* was compiled."""
        return len(self._made)

    def _covering(self, tensors: Sequence[Tensor], threads: int) -> _Made | None:
        for made in self._made:
            if made.threads == threads and made.covers(*tensors):
                return made
        return None

    def _make(self, tensors: Sequence[Tensor], threads: int) -> _Made:
        with _compiling:
            made = self._covering(tensors, threads)  # another thread may have been first
            if made is None:
                # A new thread has no modes, no hooks and no autocast, whatever the caller has.
                with ThreadPoolExecutor(1) as elsewhere:
                    made = elsewhere.submit(_make, self.function, self.varying, tensors, threads).result()
                self._made = [*self._made, made]
        return made


class _Made(NamedTuple):
    """One compilation.

    Attributes:
        threads: How many it uses on a CPU.
        covers: Whether it is right for tensors of these sizes.
        run: The compiled function.
    """

    threads: int
    covers: Callable[..., bool]
    run: Callable[..., Sequence[Tensor]]


@torch.no_grad()
def _make(
    function: Callable[..., tuple[Tensor, ...]],
    varying: Sequence[Sequence[int]],
    tensors: Sequence[Tensor],
    threads: int,
) -> _Made:
    recording = recorded(function, tensors, varying)
    settings = _settings_on_cpu() if tensors[0].device.type == "cpu" else None
    run = compiled_by_inductor(recording, settings)
    return _Made(threads, recording.covers(), run)


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


@functools.cache
def _settings_on_cpu() -> dict[str, Any] | None:
    """What Inductor is told about this CPU.

    Before its first program Inductor compiles and loads small programs for each vector instruction set of the CPU: six
    on one with AVX-512, which take 5 s. The sets contain each other, so the widest stands for all.
    """
    return {"cpp.vec_isa_ok": True} if widest_vectors_work() else None
