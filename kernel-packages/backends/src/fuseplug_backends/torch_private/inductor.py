"""The private names of torch with which a function is recorded, and compiled by Inductor without Dynamo.

Importing this imports neither.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from . import storage_id

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "Recording",
    "compile_header",
    "compiled_by_inductor",
    "forget_vectors",
    "inductor_threads",
    "prepare_recording",
    "recorded",
    "trust_vectors",
]

Build = Callable[[], Callable[..., Any]]
"""Builds a kernel in C++."""

Begin = Callable[[Build], Future[Callable[..., Any]]]
"""Has another thread call what it is given."""


class Recording(NamedTuple):
    """What a function does to tensors of some sizes, as `recorded` gives it.

    Attributes:
        graph: The operations.
        stand_ins: The tensors it was recorded with: without values, and with symbols for the sizes that vary.
        varying: For each of them the dimensions whose sizes vary. Those of 0 and 1 are numbers all the same.
        symbols: Tensors and dimensions whose sizes are symbols. The graph takes these sizes before the tensors: what
            Inductor keeps in its cache, it keeps with what was assumed of sizes that it is given, and of no others.
        sizes: What is known about the symbols. Who compiles *graph* may add to it.
    """

    graph: torch.fx.GraphModule
    stand_ins: list[FakeTensor]
    varying: Sequence[Sequence[int]]
    symbols: Sequence[tuple[int, int]]
    sizes: ShapeEnv

    @property
    def output(self) -> torch.fx.Node:
        """The node of *graph* whose first argument is the results."""
        node: torch.fx.Node = next(iter(reversed(self.graph.graph.nodes)))
        return node

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What the graph takes for *tensors*."""
        return _with_sizes(tensors, self.symbols)

    def results_share_memory(self) -> bool:
        """Whether a result shares memory with a tensor that it is given, or with another result."""
        nodes: Any = self.output.args[0]
        tensors = [*self.stand_ins, *(node.meta["val"] for node in nodes)]
        return len({*map(storage_id, tensors)}) < len(tensors)

    def covers(self) -> Callable[..., bool]:
        """A function of tensors: whether all that was assumed of the sizes that vary is true of theirs."""
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        names = [f"t{number}" for number in range(len(self.stand_ins))]
        conditions = [f"{names[n]}.size()[{dim}] == {size}" for n, dim, size in self.numbers()]
        if of_symbols := self.sizes.produce_guards_expression(self.stand_ins):
            conditions.append(re.sub(_OF_TENSOR, _NUMBERED, of_symbols))
        written = f"lambda {', '.join(names)}: {' and '.join(conditions) or True}"
        covers: Callable[..., bool] = eval(written, dict(SYMPY_INTERP))  # noqa: S307 - torch's text
        return covers

    def numbers(self) -> list[tuple[int, int, int]]:
        """Tensors and dimensions that were to vary, and the number for which their size was taken."""
        pairs = [(n, dim) for n, dims in enumerate(self.varying) for dim in dims]
        sizes = [(n, dim, self.stand_ins[n].shape[dim]) for n, dim in pairs]
        return [(n, dim, int(size)) for n, dim, size in sizes if isinstance(size, int) or _is_number(size)]


def _with_sizes(tensors: Sequence[Tensor], symbols: Sequence[tuple[int, int]]) -> list[Any]:
    return [*[tensors[n].size(dim) for n, dim in symbols], *tensors]


def _is_number(size: torch.SymInt) -> bool:
    return size.node.maybe_as_int() is not None


_OF_TENSOR, _NUMBERED = r"L\['(t\d+)'\]", r"\1"
"""How a `ShapeEnv` writes the name of a tensor."""


def prepare_recording() -> None:
    """Have torch do in this thread what it does when a fake mode is first entered on a machine without a GPU.

    A torch 2.11 that is built for CUDA crashes if another thread is the first.
    """
    if not torch.cuda.is_available():
        getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()


def recorded(function: Callable[..., Any], tensors: Sequence[Tensor], varying: Sequence[Sequence[int]]) -> Recording:
    """The operations of *function*, for *tensors* and for those that differ from them in *varying* dimensions.

    `torch.export` would do this and more, for modules; `make_fx` by itself takes every size for one that varies.

    Raises:
        TypeError: If *function* makes a number of a size that varies, as ``len(x)`` does, or returns an argument, a
            view of one or the same memory twice.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    # Sizes that happen to be equal now need not be so at the next call.
    sizes = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=sizes)
    kinds = (DimDynamic.STATIC, DimDynamic.DYNAMIC)
    stand_ins = [
        mode.from_tensor(
            # A view would bring along what it is a view of.
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device),
            symbolic_context=StatelessSymbolicContext([kinds[dim in dims] for dim in range(t.dim())]),
        )
        for t, dims in zip(tensors, varying, strict=True)
    ]
    pairs = [(n, dim) for n, dims in enumerate(varying) for dim in dims]
    symbols = [(n, dim) for n, dim in pairs if isinstance(stand_ins[n].shape[dim], torch.SymInt)]
    # A graph has the annotations of what is recorded, and Inductor's cache takes none that are strings.
    functional = torch.func.functionalize(lambda *given: tuple(function(*given)))
    # Without the dispatcher, torch 2.8 makes no view of a tensor whose sizes vary.
    with mode, enable_python_dispatcher():
        trace = make_fx(lambda *inputs: functional(*inputs[len(symbols) :]), select_decomp_table())
        graph = trace(*_with_sizes(stand_ins, symbols))
    recording = Recording(graph, stand_ins, varying, symbols, sizes)
    for n, dim, size in recording.numbers():
        if size > 1:
            raise TypeError(
                f"{function.__qualname__}: dimension {dim} of tensor {n} varies, but was taken for the number {size}: "
                "use x.shape[0] instead of len(x) or int(x.shape[0])"
            )
    if recording.results_share_memory():
        raise TypeError(
            f"{function.__qualname__}: its results share memory with its arguments or each other, and those of a "
            "program are tensors of their own: return a clone()"
        )
    return recording


def inductor_threads() -> int:
    """How many compilers Inductor would run at once. Importing Inductor to ask it takes two seconds."""
    if (threads := os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")).isdecimal():
        return int(threads)
    if sys.platform == "win32":
        return 1
    return min(32, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def compiled_by_inductor(
    recording: Recording, begin: Begin | None = None
) -> tuple[Callable[..., Sequence[Tensor]], Callable[[], None]]:
    """The graph of *recording* compiled by Inductor; `torch.compile` would ask Dynamo.

    `torch._inductor.compile` would ask AOTAutograd, which records a second time, and would put a wrapper around the
    result, for results that share memory. In a model the wrapper took 10 µs of each call, and AOTAutograd a third of
    the time that a program takes in Python. What is written to an argument is written; its version does not count it.

    Args:
        recording: What is compiled.
        begin: What has C++ built meanwhile; ``None``: this waits for that.

    Returns:
        The compiled function, and what waits until it is built.
    """
    with _counting_for_inductor(), _built_by(begin) as built:
        run = _by_inductor(recording)

    def wait() -> None:
        for library in built:
            library.result()

    return run, wait


def _by_inductor(recording: Recording) -> Callable[..., Sequence[Tensor]]:
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    graph, mode = recording.graph, recording.stand_ins[0].fake_mode
    graph.graph.eliminate_dead_code()
    results: Any = recording.output.args[0]
    # Which of them are to have the strides with which they were recorded.
    recording.output.meta["user_visible_output_idxs"] = [*range(len(results))]
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        run: Any = compile_fx_inner(graph, recording.arguments(recording.stand_ins), is_inference=True)
    symbols = recording.symbols  # alone: a recording holds its graph and all that is known of its sizes
    return lambda *tensors: run(_with_sizes(tensors, symbols))


class _Later:
    """A kernel in C++ that is being built; whoever calls it waits for that."""

    def __init__(self, build: Build, begin: Begin) -> None:
        self._build, self._future = build, begin(build)
        self._kernel: Callable[..., Any] | None = None

    def result(self) -> Callable[..., Any]:
        if self._kernel is None:
            try:
                self._kernel = self._future.result()
            except Exception:  # noqa: BLE001 - it may have been given up, and Inductor keeps what holds this for other callers
                self._kernel = self._build()
        return self._kernel

    def __call__(self, *args: Any) -> Any:
        return self.result()(*args)


_EMPTY = """\
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out_ptr0) {}
"""


def compile_header() -> None:
    """Compile the header that all programs in C++ share, unless that was done. Where there is none, this does nothing.

    It takes longer than any program. Inductor would begin with it for the first one, seconds later, once that is
    recorded and lowered.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    # What this returns would build the program itself.
    CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _EMPTY)


def _build(argtypes: list[str], source_code: str) -> Callable[..., Any]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    kernel: Callable[..., Any] = CppPythonBindingsCodeCache.load_pybinding(argtypes, source_code)
    return kernel


@contextlib.contextmanager
def _built_by(begin: Begin | None) -> Iterator[list[_Later]]:
    """Inside, *begin* has the C++ built that Inductor wants built in this thread, and nothing waits for it.

    Inductor's own way to build side by side is within one program, for whose kernels it waits.
    """
    builds: list[_Later] = []
    if begin is None:
        yield builds
        return
    from torch._inductor.async_compile import AsyncCompile

    waiting, here = AsyncCompile.cpp_pybinding, threading.get_ident()

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        if threading.get_ident() != here:
            return waiting(self, argtypes, source_code)
        builds.append(_Later(functools.partial(_build, argtypes, source_code), begin))
        return builds[-1]

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    try:
        yield builds
    finally:
        AsyncCompile.cpp_pybinding = waiting  # type: ignore[method-assign]


def _counting_for_inductor() -> contextlib.AbstractContextManager[object]:
    """What Inductor's cache of torch 2.7 counts in, and raises without; later ones do not count then."""
    from torch._dynamo.utils import CompileEventLogger, get_metrics_context

    return contextlib.nullcontext() if hasattr(CompileEventLogger, "try_") else get_metrics_context()


def trust_vectors() -> bool:
    """Have Inductor take it that this CPU's vector instructions work; whether it did not know yet.

    Otherwise it compiles and loads small programs before its first, for each set of them: six on a CPU with AVX-512.
    """
    from torch._inductor import cpu_vec_isa

    if cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return False
    check = cpu_vec_isa.VecISA.check_build
    cpu_vec_isa.VecISA.check_build = lambda self, code: True  # type: ignore[method-assign]  # noqa: ARG005
    try:
        cpu_vec_isa.valid_vec_isa_list()
    finally:
        cpu_vec_isa.VecISA.check_build = check  # type: ignore[method-assign]
    return True


def forget_vectors() -> None:
    """Have Inductor check this CPU's vector instructions, whatever it took them for."""
    from torch._inductor import cpu_vec_isa

    cached = [cpu_vec_isa.valid_vec_isa_list]
    for isa in cpu_vec_isa.supported_vec_isa_list:
        cached += [attribute for kind in type(isa).__mro__ for attribute in vars(kind).values()]
        for name in [name for name in vars(isa) if name.startswith("_is_")]:
            delattr(isa, name)
    for attribute in cached:
        if callable(clear := getattr(attribute, "cache_clear", None)):
            clear()
