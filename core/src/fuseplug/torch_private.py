"""The private names of torch that Fuseplug and its kernels need: no other module of theirs has one.

Each is here because torch documents nothing that says or does the same. All are in torch 2.7, the oldest that the
metadata admit; `tests/core/test_torch_private.py` asks each whether it does what is said here, and ``nox -s oldest``
asks it on that release.

What is asked at each call of a kernel is torch's own C function under a public name: a function around it would take
a third longer, and `torch.compile` knows torch's functions by identity. Importing this imports torch, but neither
Dynamo nor Inductor, which take a second.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor
from torch._tensor_str import get_printoptions
from torch.autograd import forward_ad
from torch.nn.modules import module as _nn_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "DYNAMO_SETTINGS",
    "DYNAMO_WRAPPERS",
    "GLOBAL_HOOKS",
    "INDUCTOR_SETTINGS",
    "JIT_INTERNALS",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "OpOverload",
    "OpOverloadPacket",
    "Recording",
    "are_functorch_transforms_active",
    "compiled_by_inductor",
    "default_store",
    "disable_current_modes",
    "forget_vectors",
    "get_printoptions",
    "get_tracing_state",
    "get_unwrapped",
    "has_onednn_linear",
    "import_dynamo",
    "in_forward_mode",
    "inductor_threads",
    "is_batchedtensor",
    "is_functorch_wrapped_tensor",
    "is_fwd_grad_enabled",
    "is_legacy_batchedtensor",
    "len_torch_dispatch_stack",
    "len_torch_function_stack",
    "onednn_linear",
    "peek_interpreter_stack",
    "pop_torch_function_stack",
    "push_on_torch_function_stack",
    "recorded",
    "schemas_of",
    "storage_id",
    "traced_away",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unsafe_view",
    "vectors_unchecked",
    "without_memory",
]

# Imported above, because nothing public names them: the types of operations (torch.ops has only instances); FakeTensor,
# to tell a tensor that has no values but is a plain one in all else; torch.get_printoptions, beside
# torch.set_printoptions; and pytree, with which torch itself walks through arguments and results.

get_tracing_state = torch._C._get_tracing_state
"""The state of `torch.jit.trace`; ``None`` outside of one. `torch.jit.is_tracing` takes almost twice as long."""

peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
"""The innermost transform of `torch.func` that is at work here; ``None`` if there is none."""

are_functorch_transforms_active = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` is at work here. Unlike `peek_interpreter_stack` it makes no object."""

is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one that a transform of `torch.func` made around another; its type is Tensor all the same."""

is_batchedtensor = torch._C._functorch.is_batchedtensor
"""Whether a tensor is one that `torch.func.vmap` made around another."""

get_unwrapped = torch._C._functorch.get_unwrapped
"""The tensor inside one that `is_functorch_wrapped_tensor`. `torch.func.debug_unwrap` is for debugging alone."""

is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor is a batch of gradients, which ``torch.autograd.grad(is_grads_batched=True)`` makes."""

len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
"""How many modes see each operation: a FakeTensorMode, a tracer's."""

len_torch_function_stack = torch._C._len_torch_function_stack
pop_torch_function_stack = torch._C._pop_torch_function_stack
push_on_torch_function_stack = torch._C._push_on_torch_function_stack
"""The modes that see each function, as ``with torch.device("meta"):`` enters one. What torch has to switch them off,
`torch._C.DisableTorchFunction`, sets a flag that Dynamo guards on."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""While it is entered, ``__torch_function__`` of subclasses is not called, so a subclass can ask what it is itself."""

is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
"""Whether forward-mode differentiation may be entered. It may not in the forward of an `autograd.Function`, and hardly
anywhere else, so this tells such a forward from ``torch.no_grad()``."""

disable_current_modes = _disable_current_modes
"""Takes the modes that see each operation off inside; the public context managers only enter one."""

unsafe_view = torch.ops.aten._unsafe_view.default
"""``unsafe_view(tensor, size)``: a tensor on the same memory that autograd takes for no view of *tensor*."""

DYNAMO_SETTINGS, INDUCTOR_SETTINGS = "torch._dynamo.config", "torch._inductor.config"
"""The modules with the settings of torch's compilers, to be looked up where somebody has imported them.
`torch.compiler.config` has few of them."""

DYNAMO_WRAPPERS = ("torch._dynamo", "torch._compile")
"""The modules in which the decorators of `torch.compiler` are written, and those around torch's own functions."""

JIT_INTERNALS = "torch._jit_internal"
"""The module in which functions of `torch.jit` are written."""

GLOBAL_HOOKS = (
    _nn_module._global_forward_hooks,
    _nn_module._global_forward_pre_hooks,
    _nn_module._global_backward_hooks,
    _nn_module._global_backward_pre_hooks,
)
"""The dicts that ``torch.nn.modules.module.register_module_…_hook`` add to: those functions add, and nothing lists."""


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is entered; `torch.autograd.forward_ad` enters and leaves it only."""
    return forward_ad._current_level >= 0


def schemas_of(op: OpOverload | OpOverloadPacket) -> list[torch._C.FunctionSchema]:
    """The schemas of *op*, one for each overload. They say which arguments it writes to, and nothing public does."""
    if isinstance(op, OpOverload):
        return [op._schema]
    return list(torch._C._jit_get_schemas_for_operator(op._qualified_op_name))


def without_memory(cls: type[Tensor], layout: Tensor, device: torch.device) -> Tensor:
    """A tensor of the subclass *cls* on *device*, with shape, strides and dtype of *layout*, that has no memory."""
    size, strides = layout.size(), layout.stride()
    return Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=layout.dtype, device=device)


def storage_id(tensor: Tensor) -> int:
    """A number that tensors on one storage share, on meta too, where ``data_ptr()`` of each is 0."""
    number: int = tensor.untyped_storage()._cdata
    return number


def has_onednn_linear() -> bool:
    """Whether this build of torch has `onednn_linear`."""
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.t()`` by oneDNN, where `torch.nn.functional.linear` takes MKL for float32.

    Args:
        x: ``(rows, in)``, float32 on the CPU.
        weight: ``(out, in)``, likewise.

    Returns:
        ``(rows, out)``, float32.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def default_store() -> Store:
    """The store with which the ranks of the default process group met. A new one would need an address of its own."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def import_dynamo() -> None:
    """Import Dynamo, which `torch.compile` does when it is first called. It wraps `torch.manual_seed` as it comes."""
    import torch._dynamo  # noqa: F401 - to have it imported


def traced_away(function: Callable[[], bool]) -> Callable[[], bool]:
    """Have Dynamo call *function* while it traces, and take what it returns for a constant.

    As `torch.compiler.assume_constant_result`, which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Recording(NamedTuple):
    """What a function does to tensors of some sizes, as `recorded` gives it.

    Attributes:
        graph: The operations.
        stand_ins: The tensors it was recorded with: without values, and with symbols for the sizes that vary.
        varying: For each of them the dimensions whose sizes vary. Those of 0 and 1 are numbers all the same.
        sizes: What is known about the symbols. Who compiles *graph* may add to it.
        is_pure: Whether it writes to no tensor that it was given, and its results share no memory.
    """

    graph: torch.fx.GraphModule
    stand_ins: list[FakeTensor]
    varying: Sequence[Sequence[int]]
    sizes: ShapeEnv
    is_pure: bool

    def covers(self) -> Callable[..., bool]:
        """A function of tensors: whether all that was assumed of the sizes that vary is true of theirs."""
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        names = [f"t{number}" for number in range(len(self.stand_ins))]
        conditions = [f"{names[n]}.size()[{dim}] == {size}" for n, dim, size in self.numbers()]
        if of_symbols := self.sizes.produce_guards_expression(self.stand_ins):
            conditions.append(re.sub(_OF_TENSOR, _NUMBERED, of_symbols))
        written = f"lambda {', '.join(names)}: {' and '.join(conditions) or True}"
        found: Callable[..., bool] = eval(written, dict(SYMPY_INTERP))  # noqa: S307 - torch's text
        return found

    def numbers(self) -> list[tuple[int, int, int]]:
        """Tensors and dimensions that were to vary, and the number for which their size was taken."""
        pairs = [(n, dim) for n, dims in enumerate(self.varying) for dim in dims]
        sizes = [(n, dim, self.stand_ins[n].shape[dim]) for n, dim in pairs]
        return [(n, dim, int(size)) for n, dim, size in sizes if isinstance(size, int) or _is_number(size)]


def _is_number(size: torch.SymInt) -> bool:
    return size.node.maybe_as_int() is not None


_OF_TENSOR, _NUMBERED = r"L\['(t\d+)'\]", r"\1"
"""How a `ShapeEnv` writes the name of a tensor."""


def recorded(function: Callable[..., Any], tensors: Sequence[Tensor], varying: Sequence[Sequence[int]]) -> Recording:
    """The operations of *function*, for *tensors* and for those that differ from them in *varying* dimensions.

    `torch.export` would do this and more, for modules; `make_fx` by itself takes every size for one that varies.

    Raises:
        TypeError: If *function* makes a number of a size that varies, as ``len(x)`` does.
    """
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
    results: list[Tensor] = []

    def noted(found: Sequence[Tensor]) -> tuple[Tensor, ...]:
        results.extend(found)
        return tuple(found)

    versions = [t._version for t in stand_ins]
    with mode:
        # A graph has the annotations of what is recorded, and Inductor's cache takes none that are strings.
        graph = make_fx(lambda *given: noted(function(*given)))(*stand_ins)
    memory = {storage_id(t) for t in (*stand_ins, *results)}
    is_pure = len(memory) == len(stand_ins) + len(results) and versions == [t._version for t in stand_ins]
    found = Recording(graph, stand_ins, varying, sizes, is_pure)
    for n, dim, size in found.numbers():
        if size > 1:
            raise TypeError(
                f"{function.__qualname__}: dimension {dim} of tensor {n} varies, but was taken for the number {size}: "
                "use x.shape[0] instead of len(x) or int(x.shape[0])"
            )
    return found


def inductor_threads() -> int:
    """How many compilers Inductor would run at once. Importing Inductor to ask it takes two seconds."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None and config.compile_threads is not None:
        return int(config.compile_threads)
    if (said := os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")).isdecimal():
        return int(said)
    return 1 if sys.platform == "win32" else min(32, torch._utils.cpu_count() or 1)


def compiled_by_inductor(
    recording: Recording, settings: dict[str, Any] | None, builders: Executor | None = None
) -> tuple[Callable[..., Sequence[Tensor]], Callable[[], None]]:
    """The graph of *recording* compiled by Inductor, with *settings* of its own; `torch.compile` would ask Dynamo.

    `torch._inductor.compile` is the same with a wrapper, which sees to results that share memory with others and to
    what is written to. Where there is nothing of that kind, it is left out: in a model it took 10 µs of each call.

    Args:
        recording: What is compiled.
        settings: Changes to Inductor's configuration.
        builders: What builds C++ meanwhile; ``None``: this waits for that.

    Returns:
        The compiled function, and what waits until it is built.
    """
    from torch._functorch import config as functorch
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    compiled: list[Callable[..., Sequence[Tensor]]] = []

    def inner_compile(graph: torch.fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        made = compile_fx_inner(graph, inputs, **how)
        if len(inputs) == len(recording.stand_ins):
            compiled.append(made)
        return made

    # What this cache gives comes with its wrapper. Inductor has a cache of its own.
    with functorch.patch(enable_autograd_cache=False), _counting_for_inductor(), _built_by(builders) as built:
        wrapped: Any = compile_fx(
            recording.graph, [*recording.stand_ins], inner_compile=inner_compile, config_patches=settings
        )

    def wait() -> None:
        for each in built:
            each.result()

    if not (recording.is_pure and compiled):
        return wrapped, wait
    (run,) = compiled
    return lambda *tensors: run([*tensors]), wait


class _Later:
    """A kernel in C++ that is being built; whoever calls it waits for that."""

    def __init__(self, build: Callable[[], Callable[..., Any]], builders: Executor) -> None:
        self._build, self._future = build, builders.submit(contextvars.copy_context().run, build)
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


@contextlib.contextmanager
def _built_by(builders: Executor | None) -> Iterator[list[_Later]]:
    """Inside, the C++ that Inductor wants built in this thread is built by *builders*, and nothing waits for it.

    Inductor's own way to build side by side is within one program, for whose kernels it waits.
    """
    begun: list[_Later] = []
    if builders is None:
        yield begun
        return
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    waiting, here = AsyncCompile.cpp_pybinding, threading.get_ident()

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        if threading.get_ident() != here:
            return waiting(self, argtypes, source_code)
        build = functools.partial(CppPythonBindingsCodeCache.load_pybinding, argtypes, source_code)
        begun.append(_Later(build, builders))
        return begun[-1]

    AsyncCompile.cpp_pybinding = cpp_pybinding  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        AsyncCompile.cpp_pybinding = waiting  # type: ignore[method-assign]


def _counting_for_inductor() -> contextlib.AbstractContextManager[object]:
    """What Inductor's cache of torch 2.7 counts in, and raises without; later ones do not count then."""
    from torch._dynamo.utils import CompileEventLogger, get_metrics_context

    return contextlib.nullcontext() if hasattr(CompileEventLogger, "try_") else get_metrics_context()


def vectors_unchecked() -> dict[str, Any] | None:
    """Settings with which Inductor takes it that this CPU's vector instructions work; ``None`` if its user has any.

    Otherwise it compiles and loads small programs before its first, for each set of them: six on a CPU with AVX-512.
    """
    from torch._inductor import config

    return {"cpp.vec_isa_ok": True} if config.cpp.vec_isa_ok is None else None


def forget_vectors() -> None:
    """Have Inductor check this CPU's vector instructions, whatever it took them for."""
    from torch._inductor import cpu_vec_isa

    cached = [cpu_vec_isa.valid_vec_isa_list]
    for isa in cpu_vec_isa.supported_vec_isa_list:
        cached += [each for kind in type(isa).__mro__ for each in vars(kind).values()]
    for each in cached:
        if callable(clear := getattr(each, "cache_clear", None)):
            clear()
