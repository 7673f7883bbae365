"""The private names of torch that record a function and have Inductor compile it, without Dynamo.

Importing this module imports neither Inductor nor Dynamo.
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
"""Has another thread call a `Build`."""


class Recording(NamedTuple):
    """The operations of a function on tensors of certain sizes, as `recorded` returns them.

    Attributes:
        graph: The operations.
        stand_ins: The tensors that the function was recorded with. They have no values, and symbols for the sizes that
            vary.
        varying: For each stand-in, the dimensions whose sizes vary. Sizes of 0 and 1 are numbers all the same.
        symbols: The tensors and dimensions whose sizes are symbols. The graph takes these sizes before the tensors,
            because Inductor's cache keeps the assumptions about sizes that are arguments, and about no others.
        sizes: What is known about the symbols. Compiling *graph* may add to it.
    """

    graph: torch.fx.GraphModule
    stand_ins: list[FakeTensor]
    varying: Sequence[Sequence[int]]
    symbols: Sequence[tuple[int, int]]
    sizes: ShapeEnv

    @property
    def output(self) -> torch.fx.Node:
        """The node of *graph* whose first argument holds the results."""
        node: torch.fx.Node = next(iter(reversed(self.graph.graph.nodes)))
        return node

    def arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments that the graph takes for *tensors*."""
        return _with_sizes(tensors, self.symbols)

    def results_share_memory(self) -> bool:
        """Whether a result shares memory with an argument, or with another result."""
        nodes: Any = self.output.args[0]
        tensors = [*self.stand_ins, *(node.meta["val"] for node in nodes)]
        return len({*map(storage_id, tensors)}) < len(tensors)

    def covers(self) -> Callable[..., bool]:
        """A function that tells whether the sizes of its tensors meet all assumptions about sizes that vary."""
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        names = [f"t{number}" for number in range(len(self.stand_ins))]
        conditions = [f"{names[n]}.size()[{dim}] == {size}" for n, dim, size in self.numbers()]
        if of_symbols := self.sizes.produce_guards_expression(self.stand_ins):
            conditions.append(re.sub(_OF_TENSOR, _NUMBERED, of_symbols))
        written = f"lambda {', '.join(names)}: {' and '.join(conditions) or True}"
        covers: Callable[..., bool] = eval(written, dict(SYMPY_INTERP))  # noqa: S307 - torch's text
        return covers

    def numbers(self) -> list[tuple[int, int, int]]:
        """Each dimension that was to vary but was taken for a number: its tensor, the dimension, and the number."""
        pairs = [(n, dim) for n, dims in enumerate(self.varying) for dim in dims]
        sizes = [(n, dim, self.stand_ins[n].shape[dim]) for n, dim in pairs]
        return [(n, dim, int(size)) for n, dim, size in sizes if isinstance(size, int) or _is_number(size)]


def _with_sizes(tensors: Sequence[Tensor], symbols: Sequence[tuple[int, int]]) -> list[Any]:
    return [*[tensors[n].size(dim) for n, dim in symbols], *tensors]


def _is_number(size: torch.SymInt) -> bool:
    return size.node.maybe_as_int() is not None


_OF_TENSOR, _NUMBERED = r"L\['(t\d+)'\]", r"\1"
"""The name of a tensor as a `ShapeEnv` writes it, and its replacement."""


def prepare_recording() -> None:
    """Run, in this thread, torch's preparation for the first fake mode on a machine without a GPU.

    A torch 2.11 that is built for CUDA crashes if another thread runs it first.
    """
    if not torch.cuda.is_available():
        getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()


def recorded(function: Callable[..., Any], tensors: Sequence[Tensor], varying: Sequence[Sequence[int]]) -> Recording:
    """The operations of *function*, for *tensors* and for tensors whose sizes differ in *varying* dimensions.

    `torch.export` would do this and more, but for modules; `make_fx` by itself treats every size as one that varies.

    Raises:
        TypeError: If *function* turns a size that varies into a number, as ``len(x)`` does, or returns an argument, a
            view of an argument, or the same memory twice.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    # Sizes that happen to be equal now need not be equal at the next call.
    sizes = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=sizes)
    kinds = (DimDynamic.STATIC, DimDynamic.DYNAMIC)
    stand_ins = [
        mode.from_tensor(
            # A view would bring its base along.
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device),
            symbolic_context=StatelessSymbolicContext([kinds[dim in dims] for dim in range(t.dim())]),
        )
        for t, dims in zip(tensors, varying, strict=True)
    ]
    pairs = [(n, dim) for n, dims in enumerate(varying) for dim in dims]
    symbols = [(n, dim) for n, dim in pairs if isinstance(stand_ins[n].shape[dim], torch.SymInt)]
    # A lambda, because a graph gets the annotations of the recorded function, and Inductor's cache accepts no strings.
    functional = torch.func.functionalize(lambda *given: tuple(function(*given)))
    # Without the dispatcher, torch 2.8 cannot make a view of a tensor whose sizes vary.
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
            f"{function.__qualname__}: its results share memory with its arguments or each other, and a "
            "program must return new tensors: return a clone()"
        )
    return recording


def inductor_threads() -> int:
    """How many compilers Inductor would run at once. To ask Inductor itself, importing it would take two seconds."""
    if (threads := os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")).isdecimal():
        return int(threads)
    if sys.platform == "win32":
        return 1
    return min(32, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def compiled_by_inductor(
    recording: Recording, begin: Begin | None = None
) -> tuple[Callable[..., Sequence[Tensor]], Callable[[], None]]:
    """The graph of *recording* compiled by Inductor, without Dynamo, which `torch.compile` would use.

    `torch._inductor.compile` would use AOTAutograd, which records a second time, and would wrap the compiled function,
    because results may share memory. In a model, the wrapper took 10 µs of each call, and AOTAutograd a third of the
    time that a program takes in Python. A write to an argument takes effect, but the argument's version does not count
    it.

    Args:
        recording: The recording to compile.
        begin: Builds the C++ in the background; with ``None``, this function waits for it.

    Returns:
        The compiled function, and a function that waits until the compiled one is built.
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
    # All results are to have the strides with which they were recorded.
    recording.output.meta["user_visible_output_idxs"] = [*range(len(results))]
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        run: Any = compile_fx_inner(graph, recording.arguments(recording.stand_ins), is_inference=True)
    symbols = recording.symbols  # only these: the recording would keep its graph and all knowledge of sizes alive
    return lambda *tensors: run(_with_sizes(tensors, symbols))


class _Later:
    """A kernel in C++ that is being built; a call waits until the build is done."""

    def __init__(self, build: Build, begin: Begin) -> None:
        self._build, self._future = build, begin(build)
        self._kernel: Callable[..., Any] | None = None

    def result(self) -> Callable[..., Any]:
        if self._kernel is None:
            try:
                self._kernel = self._future.result()
            except Exception:  # noqa: BLE001 - the build may have been given up, but Inductor's cache keeps this kernel
                self._kernel = self._build()
        return self._kernel

    def __call__(self, *args: Any) -> Any:
        return self.result()(*args)


_EMPTY = """\
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out_ptr0) {}
"""


def compile_header() -> None:
    """Compile the header that all programs in C++ share, unless it is compiled already or there is none.

    The header takes longer than any program. Inductor would begin with it seconds later, once the first program is
    recorded and lowered.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    # This returns a function that would build the program itself; it is not called.
    CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _EMPTY)


def _build(argtypes: list[str], source_code: str) -> Callable[..., Any]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    kernel: Callable[..., Any] = CppPythonBindingsCodeCache.load_pybinding(argtypes, source_code)
    return kernel


@contextlib.contextmanager
def _built_by(begin: Begin | None) -> Iterator[list[_Later]]:
    """Inside, *begin* builds the C++ that Inductor wants built in this thread, and nothing waits for it.

    Inductor itself builds side by side only within one program, and waits for the kernels of that program.
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
    """The context in which Inductor's cache counts. Without it, torch 2.7 raises; later versions do not count."""
    from torch._dynamo.utils import CompileEventLogger, get_metrics_context

    return contextlib.nullcontext() if hasattr(CompileEventLogger, "try_") else get_metrics_context()


def trust_vectors() -> bool:
    """Have Inductor assume that this CPU's vector instructions work; return whether it did not know yet.

    Otherwise Inductor compiles and loads small programs before its first one, for each set of vector instructions: six
    on a CPU with AVX-512.
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
    """Have Inductor check this CPU's vector instructions, whatever it assumed before."""
    from torch._inductor import cpu_vec_isa

    cached = [cpu_vec_isa.valid_vec_isa_list]
    for isa in cpu_vec_isa.supported_vec_isa_list:
        cached += [attribute for kind in type(isa).__mro__ for attribute in vars(kind).values()]
        for name in [name for name in vars(isa) if name.startswith("_is_")]:
            delattr(isa, name)
    for attribute in cached:
        if callable(clear := getattr(attribute, "cache_clear", None)):
            clear()
