"""Tells whether a tensor still has the values that it had when a result was left uncomputed from it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fuseplug.process_lock import ProcessLock

from ..torch_private import storage_id

__all__ = ["InputReader", "Remembered", "has_sample", "read_before_steps"]

SAMPLED = 4096
"""About how many elements of a tensor are sampled: all of a small one, and some of every part of a large one."""


class Remembered:
    """The earlier state of a tensor, to be compared with its present state.

    A write by an operation of torch counts in the tensor's version, and an assignment to its ``data`` gives it other
    memory. A write through ``tensor.data`` or a foreign pointer leaves neither trace. To see such writes, a sample of
    the elements is kept on the tensor's device, where taking it waits for nothing. A write that changes no sampled
    element is not seen, unless it is the step of an optimizer that owns the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._version, self._memory = tensor._version, storage_id(tensor)
        self.sample = _sample(tensor)
        self.stepped = False

    def change(self, *, waiting: bool = True) -> str:
        """What has been done to the tensor since, as a verb for a message; ``""`` if nothing has.

        Args:
            waiting: Whether to compare the sample on an accelerator, too, which waits for the device.
        """
        tensor = self.tensor
        if tensor.numel() and tensor.untyped_storage().size() == 0:
            return "was freed"
        if self.stepped or tensor._version != self._version or storage_id(tensor) != self._memory:
            return "was changed in place"
        if (waiting or tensor.device.type == "cpu") and not has_sample(tensor, self.sample):
            return "was changed in place"
        return ""


class InputReader(Protocol):
    """Results that were left uncomputed, and the tensors from which to compute them."""

    @property
    def inputs(self) -> Sequence[Remembered]:
        """The tensors, as they were."""

    def read_kept(self) -> None:
        """Compute the results if somebody keeps a copy, because the inputs are about to change."""


_LOCK = ProcessLock()
_readers: weakref.WeakSet[Any] = weakref.WeakSet()


def read_before_steps(reader: InputReader) -> None:
    """Call *reader* before each step of an optimizer that owns one of its inputs; mark these inputs after the step."""
    _hook_optimizers()
    with _LOCK:
        _readers.add(reader)


@functools.cache
def _hook_optimizers() -> None:
    # Once for the process. Removing the hooks again would change a dict over which an optimizer may be iterating.
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, *_arguments: Any) -> None:
    for reader, _ in _owned(optimizer):
        reader.read_kept()


def _after(optimizer: Optimizer, *_arguments: Any) -> None:
    for _, inputs in _owned(optimizer):
        for remembered in inputs:
            remembered.stepped = True


def _owned(optimizer: Optimizer) -> Iterable[tuple[InputReader, list[Remembered]]]:
    """The readers with inputs that *optimizer* owns, each with these inputs."""
    with _LOCK:
        readers = list(_readers)
    owned = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]} if readers else ()
    for reader in readers:
        inputs = [remembered for remembered in reader.inputs if id(remembered.tensor) in owned]
        if inputs:
            yield reader, inputs


def _sample(tensor: Tensor) -> Tensor:
    """A copy of some elements of *tensor*, an odd number apart, so that all columns of a matrix have their turn."""
    with torch.no_grad():
        tensor, count = tensor.detach(), tensor.numel()
        step = count // SAMPLED | 1
        if tensor.is_contiguous():
            return tensor.view(-1)[::step].clone()
        return tensor.take(torch.arange(0, count, step, device=tensor.device))


def has_sample(tensor: Tensor, sample: Tensor) -> bool:
    """Whether the sampled elements of *tensor* have the bits of *sample*."""
    now = _sample(tensor)
    return now.shape == sample.shape and torch.equal(now.view(torch.uint8), sample.view(torch.uint8))
