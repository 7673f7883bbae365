"""The kernels of `HostNPU`: each computes an op on the CPU, in the memory of its arguments."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .generators import drawing
from .memory import on_host, on_npu
from .references import references, when_added
from .torch_private import OpOverload, arguments_of, destroy, registered_for

_KEPT = frozenset(
    """
    as_strided_ empty empty_like empty_strided get_npu_format get_storage_size is_pinned new_empty new_empty_strided
    record_stream resize_ resize_as_ set_ _pin_memory
    """.split()  # noqa: SIM905 - to be read
)
"""Ops that allocate memory, or only say how to read it: torch_npu's own kernels for them work on the stand-in, too."""

_MIXING = frozenset(
    """
    copy_ _copy_from _copy_from_and_resize index index_put index_put_ _index_put_impl_ _to_copy
    """.split()  # noqa: SIM905 - to be read
)
"""Ops of torch that take CPU tensors together with tensors of a device."""

_LIBRARIES = ("aten", "npu")

Called = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], None]


class _Kernels:
    """The kernels that replace torch_npu's.

    Attributes:
        called: Is called before each call is computed, with the op and its positional and keyword arguments.
    """

    called: Called

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._libraries: dict[str, Library] = {}
        self._replaced: set[str] = set()
        when_added(self._added)

    def put(self, called: Called) -> None:
        """Replace each kernel of torch_npu, and add one for each other op that has a reference."""
        self.called = called
        rows = references()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that a kernel is overridden
            if not self._replaced:
                for name, op in _registered().items():
                    self._replace(name, _Kernel(op, name))
                self._replace("aten::contiguous", _contiguous)
                # torch_npu's autograd formula of one_hot calls the device without asking the dispatcher.
                one_hot = _Kernel(torch.ops.aten.one_hot.default, "aten::one_hot")
                self._replace("aten::one_hot", one_hot, "AutogradPrivateUse1")
            for name in rows.keys() - self._replaced:
                if (op_of_a_reference := _op(name)) is not None:
                    self._replace(name, _Kernel(op_of_a_reference, name))

    def _replace(self, name: str, kernel: Callable[..., Any], key: str = "PrivateUse1") -> None:
        space, _, rest = name.partition("::")
        if space not in self._libraries:
            self._libraries[space] = Library(space, "IMPL")  # type: ignore[no-untyped-call]
        # Not by Library.impl, which refuses to override in some releases of torch.
        self._libraries[space].m.impl(rest, key, kernel, False)  # type: ignore[union-attr]
        self._replaced.add(name)

    def take_away(self) -> None:
        """Restore torch_npu's own kernels, and leave no others."""
        for library in self._libraries.values():
            destroy(library)
        self._libraries.clear()
        self._replaced.clear()

    def _added(self) -> None:
        with self._lock:
            if self._replaced:
                self.put(self.called)


KERNELS = _Kernels()


@functools.cache
def _registered() -> dict[str, OpOverload]:
    """The ops of torch and torch_npu whose kernel in torch_npu is to be replaced."""
    names = registered_for("PrivateUse1")
    ops = {name: _op(name) for name in names if name.partition("::")[0] in _LIBRARIES}
    stay = {name for name, op in ops.items() if op is not None and (op.is_view or op.overloadpacket.__name__ in _KEPT)}
    return {name: op for name, op in ops.items() if op is not None and name not in stay}


def _op(name: str) -> OpOverload | None:
    """The op of a qualified name; ``None`` if only a kernel is registered under *name*, without an op."""
    packet, _, overload = name.partition(".")
    space, _, bare = packet.partition("::")
    found = getattr(getattr(torch.ops, space), bare, None)
    op: OpOverload | None = getattr(found, overload or "default", None)
    return op


class _Kernel:
    """The kernel of an op: it runs the op's reference, or torch's CPU kernel, on the same memory."""

    def __init__(self, op: OpOverload, name: str) -> None:
        self.op = op
        self._name = name
        self._arguments = [argument.name for argument in arguments_of(op)]
        self.outs = frozenset(argument.name for argument in arguments_of(op) if argument.is_out)
        self.draws = torch.Tag.nondeterministic_seeded in op.tags
        self.mixes_devices = op.overloadpacket.__name__ in _MIXING
        # op-plugin allocates each result anew from sizes alone: op_plugin/ops/opapi, npu_preparation::apply_tensor.
        self.allocates_anew = op.namespace == "npu"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        op = self.op
        KERNELS.called(op, args, kwargs)
        row = references().get(self._name)
        if row is not None:
            args, kwargs = (), {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        elif op.namespace != "aten":
            raise NotImplementedError(
                f"{op} has no reference, so it cannot be computed without an NPU: write a function that computes it on "
                f'the CPU, and decorate it with @fuseplug_host_npu.reference("{self._name}")'
            )
        call = _Call(self, args, kwargs)
        with drawing(call.generator) if self.draws or "generator" in kwargs else contextlib.nullcontext():
            results = (row or op)(*call.args, **call.kwargs)
        return call.back(results)


def _contiguous(self: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return self if self.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)


class _Call:
    """Takes the arguments of a call to the CPU, and its results back to the NPU.

    Attributes:
        args: The positional arguments for the CPU.
        kwargs: The keyword arguments for the CPU.
        generator: The generator among the arguments, if there is one.
    """

    def __init__(self, kernel: _Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kernel = kernel
        self._returns_to_cpu = "device" in kwargs and torch.device(kwargs["device"] or "npu").type != "npu"
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._outs: list[tuple[Tensor, Tensor]] = []
        self.generator: torch.Generator | None = None
        self.args = _mapped(self._to_cpu, args)
        self.kwargs = {
            name: _mapped(self._room if name in kernel.outs else self._to_cpu, value) for name, value in kwargs.items()
        }
        if not kernel.mixes_devices:
            self._require_one_device()

    def _require_one_device(self) -> None:
        """Raise for tensors of the CPU, as an NPU does: only ops of torch take them, and only those without dims."""
        op = self._kernel.op
        numbers_pass = op.namespace == "aten"
        tensors = [tensor for _, tensor in self._tensors.values()]
        if any(tensor.device.type != "npu" and not (numbers_pass and tensor.dim() == 0) for tensor in tensors):
            found = " and ".join(dict.fromkeys(str(tensor.device) for tensor in tensors))
            raise RuntimeError(f"{op}: Expected all tensors to be on the same device, but found {found}")

    def _to_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            host = on_host(value) if value.device.type == "npu" else value
            self._tensors[id(host)] = (host, value)
            return host
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            if value.device.type != "npu":
                raise RuntimeError(f"Expected a 'npu' device type for generator but found '{value.device.type}'")
            self.generator = value
            return None
        return value

    def _room(self, out: Any) -> Any:
        """An empty tensor for the op to resize and write in the place of *out*, whose memory may be too small."""
        if not isinstance(out, Tensor):
            return out
        host = torch.empty(0, dtype=out.dtype)
        self._tensors[id(host)] = (host, out)
        self._outs.append((host, out))
        return host

    def back(self, results: Any) -> Any:
        """The results on the NPU: the argument itself where the op returns an argument, else a new tensor."""
        for host, out in self._outs:
            if out.size() != host.size():
                out.resize_(host.size())
            on_host(out).copy_(host)
        return _mapped(self._to_npu, results)

    def _to_npu(self, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in self._tensors:
            return self._tensors[id(result)][1]
        if self._returns_to_cpu:
            return result
        return on_npu(_in_order(result) if self._kernel.allocates_anew else result)


def _mapped(convert: Callable[[Any], Any], value: Any) -> Any:
    """*value*, converted by *convert*; lists and tuples, in which ops nest their arguments, item by item."""
    if isinstance(value, list):
        return [_mapped(convert, item) for item in value]
    return tuple(_mapped(convert, item) for item in value) if isinstance(value, tuple) else convert(value)


def _in_order(host: Tensor) -> Tensor:
    """*host* with the strides of a new tensor of its size. `Tensor.contiguous` keeps the strides of dims of size 1."""
    ordered = torch.empty(host.size(), dtype=host.dtype)
    return host if host.stride() == ordered.stride() else ordered.copy_(host)
