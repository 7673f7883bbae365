"""Launches of Triton kernels as operations of torch, so that compilers, exporters and fake tensors know their results.

Eager calls bypass the dispatcher, which takes as much host time as a launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseplug.process_lock import ProcessLock

from ..torch_private import len_torch_dispatch_stack
from .kernel import interpreted

Results = Callable[..., Any]
Launch = Callable[..., None]


def operation(schema: str, results: Results) -> Callable[[Launch], Operation]:
    """Make an `Operation` of the decorated function.

    For example::

        @operation("fuseplug_example::double(Tensor x) -> Tensor", torch.empty_like)
        def double(y, x):
            _double[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)

    Args:
        schema: ``"namespace::name(arguments) -> results"``, as `torch.library.Library.define` takes it. No result may
            be a view of an argument, and no argument is written to.
        results: Takes the arguments and returns the results, not yet filled: a tensor, or a tuple or list of tensors.
            It is also the meta function, so it looks only at shapes, strides and dtypes.
    """
    return functools.partial(Operation, schema, results)


class Operation:
    """An operation of torch: one function makes the results, and another fills them.

    Args:
        schema: As for `operation`.
        results: As for `operation`.
        launch: Takes the results and the arguments, and starts the kernels that fill the results. The current device
            is that of the first argument, which is a tensor.
    """

    def __init__(self, schema: str, results: Results, launch: Launch) -> None:
        self.results = results
        self.launch = _in_turn(launch) if interpreted() else launch
        namespace, _, rest = schema.partition("::")
        name = rest.partition("(")[0]
        self._library = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._library.define(rest, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        self._library.impl(name, self._run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        self._library.impl(name, results, "Meta")  # type: ignore[no-untyped-call]
        self.op: Callable[..., Any] = getattr(getattr(torch.ops, namespace), name).default
        self.__doc__ = launch.__doc__

    def __call__(self, *arguments: Any) -> Any:
        """Compute the results of *arguments*, all positional. Nothing is recorded for a backward."""
        if torch.compiler.is_compiling() or len_torch_dispatch_stack():
            return self.op(*arguments)
        return self._run(*arguments)

    def _run(self, *arguments: Any) -> Any:
        index = arguments[0].device.index
        if index is None or index == torch.accelerator.current_device_index():
            results = self.results(*arguments)
            self.launch(results, *arguments)
            return results
        with torch.accelerator.device_index(index):
            results = self.results(*arguments)
            self.launch(results, *arguments)
            return results


@functools.lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program may have: 227 KB on an H100, 99 on an L40S, 64 on an MI300.

    Without such a GPU, as in the interpreter, the bytes of an H100.
    """
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", 64 << 10) if properties else 227 << 10


def offsets_fit(tensor: Tensor, dims: int) -> bool:
    """Whether 32 bits, in which Triton multiplies an index by a stride, reach the last element of *tensor*.

    A permuted or strided view reaches further than the number of its elements.

    Args:
        tensor: A tensor of any layout.
        dims: The number of its last dimensions that are indexed in 32 bits.
    """
    if tensor.is_contiguous() and math.prod(tensor.shape[-dims:]) < 1 << 31:
        return True  # takes the host less time
    along = zip(tensor.shape[-dims:], tensor.stride()[-dims:], strict=True)
    return sum([(size - 1) * max(abs(stride), 1) for size, stride in along]) < 1 << 31  # a copy has no stride of 0


_interpreting = ProcessLock()


def _in_turn(launch: Launch) -> Launch:
    """Run *launch* in one thread at a time: the interpreter keeps the program that it runs in globals."""

    @functools.wraps(launch)
    def locked(*arguments: Any) -> None:
        with _interpreting:
            launch(*arguments)

    return locked
