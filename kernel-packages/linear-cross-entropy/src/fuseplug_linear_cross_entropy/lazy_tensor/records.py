"""The records of lazy tensors, and how the lazy tensors that come from one call become real."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from ..torch_private import (
    DisableTorchFunctionSubclass,
    disable_current_modes,
    function_modes_off,
    swap_values,
    temporarily_clear_interpreter_stack,
    without_memory,
)
from .gradients import Answered, Hook, shape_of
from .unchanged import Remembered, has_sample, read_before_steps

Make = Callable[..., Tensor]


class Realised(Protocol):
    """Is told when a lazy tensor is computed after all."""

    def real(self, why: str) -> None:
        """Take note that *why*, the name of a function, needed the values."""


class Record:
    """The state of one lazy tensor.

    Attributes:
        family: All lazy tensors that come from the same call.
        make: Computes the tensor from *inputs*.
        replay: Computes the tensor from its *parent* and *further* tensors; without a parent, from *inputs*.
        inputs: All tensors that it depends on.
        layout: The tensor on meta.
        parent: The lazy tensor that it was made from; ``None`` if it comes from the call itself.
        facts: The data of the subclass.
        autocast: The autocast in force when it was made.
        recorded: Whether its graph is that of *make*. A tensor made in an `autograd.Function` gets that function's.
        kept: Whether it is a copy, which somebody may have made to keep.
        answered: Whether a result was computed without its values.
        device: Its device.
        hooks: The hooks that the backward of such a result calls.
        values: Its values below autograd, while it becomes real.
        became: The real tensor, for code that still has the lazy one, because it saved that for a backward.
        failed: The error if it could not become real with the others.
    """

    def __init__(
        self,
        family: Family,
        make: Make,
        *,
        replay: Make,
        inputs: Sequence[Tensor | None],
        layout: Tensor,
        parent: Recorded | None,
        facts: Mapping[str, Any],
        further: Sequence[Tensor] = (),
    ) -> None:
        self.device = next(tensor for tensor in inputs if tensor is not None).device
        kind = self.device.type
        self.family, self.make, self.replay, self.inputs = family, make, replay, tuple(inputs)
        self.layout, self.parent, self.facts = layout, parent, facts
        self.remembered = [Remembered(tensor) for tensor in further]
        self.autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        self.recorded, self.kept, self.answered = torch.is_grad_enabled(), False, False
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        self.values: Tensor | None = None
        self.became: Tensor | None = None
        self.version = 0
        self.failed: RuntimeError | None = None

    def all_remembered(self) -> list[Remembered]:
        """The inputs as they were in the call; only while the tensor is lazy."""
        before = self.family.inputs if self.parent is None else self.parent._record.all_remembered()
        return [*before, *self.remembered]

    def check(self, why: str, remembered: Iterable[Remembered], *, waiting: bool = True) -> None:
        """Raise a `RuntimeError` if one of *remembered* was changed."""
        for source in remembered:
            change = source.change(waiting=waiting)
            if change:
                raise RuntimeError(
                    f"{why} needs the values of a lazy {shape_of(self.layout)}, which were not computed in the "
                    f"forward, and now one of its inputs, {shape_of(source.tensor)}, {change}: use it before "
                    "optimizer.step() and before parameters are sharded again (.detach() is such a use), or undo the "
                    "kernel"
                )

    def become_real(self, lazy: Recorded, why: str) -> None:
        """Turn *lazy*, whose record this is, into the tensor that it stands for."""
        if isinstance(self.parent, Recorded):
            self.failed = self.parent._record.failed
            return
        try:
            self.check(why, self.remembered)
        except RuntimeError as error:
            self.failed = error
            return
        tensors = self.inputs if self.parent is None else (self.parent, *(source.tensor for source in self.remembered))
        with torch.set_grad_enabled(self.recorded), under(self.autocast):
            real = self.replay(*tensors)
        if not self.recorded:
            # Through `__torch_dispatch__`, so that the gradient passes the `autograd.Function` that passed *lazy* on.
            self.values = real
            real = torch.clone(lazy)
        elif any(real is tensor for tensor in tensors):
            real = real.view_as(real)
        del lazy._record
        real.__class__ = type(lazy)
        cast("Tensor", lazy).__class__ = Answered if self.answered and real.requires_grad else Tensor
        swap_values(lazy, real)
        cast("Recorded", real)._record = self
        self.became, self.version = lazy, lazy._version
        if isinstance(lazy, Answered):
            lazy.take_over(self.hooks, self.layout)
        self.parent, self.values, self.inputs, self.facts, self.remembered = None, None, (), {}, []

    def saved(self, why: str) -> Tensor:
        """The real tensor, for a lazy one that was saved for a backward before it became real."""
        if self.became is None:
            raise self.failed or RuntimeError(
                f"{why} needs the values of a lazy {shape_of(self.layout)}, which are gone"
            )
        if self.became._version != self.version:
            raise RuntimeError(
                f"{why} needs a lazy {shape_of(self.layout)} that an autograd.Function saved, but it was written into "
                "since: save a clone of it"
            )
        return self.became

    def value(self, lazy: Recorded, why: str) -> Tensor:
        """The values of *lazy*, whose record this is, below autograd."""
        if self.values is not None:
            return self.values
        with DisableTorchFunctionSubclass():
            if self.became is None:
                lazy._forgo()
                self.family.become_real(why, self)
            return self.saved(why).detach()


class Recorded(Tensor):
    """A tensor that has a record. Once it is real, it is no longer of this class."""

    _record: Record

    def _forgo(self) -> list[Recorded]:
        """Note that a result is computed without this tensor and its ancestors: their gradients are never known."""
        lazies: list[Recorded] = []
        lazy: Tensor | None = self
        while isinstance(lazy, Recorded):
            lazy._record.answered = True
            lazies.append(lazy)
            lazy = lazy._record.parent
        return lazies


class Family:
    """All lazy tensors that come from one call. They become real together.

    Attributes:
        inputs: The inputs of the call.
        members: The lazy tensors, in the order in which they were made.
        lock: Held by the thread that makes them real.
        told: Is told when they become real.
        hooked: Whether the tensors that the call saved for a backward were seen by hooks.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self.inputs = [Remembered(tensor) for tensor in inputs]
        self.members: list[weakref.ref[Recorded]] = []
        self.lock = threading.RLock()
        self.told: Realised | None = None
        self.hooked = saves_are_hooked()
        read_before_steps(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def become_real(self, why: str, needed: Record) -> None:
        """Make all lazy tensors real, because *why* needs the values of the one with the record *needed*."""
        with self.lock, as_in_forward():
            if needed.failed is None:
                needed.check(why, self.inputs)
                if self.told is not None:
                    self.told.real(why)
                for member in self.members:
                    lazy = member()
                    if isinstance(lazy, Recorded):
                        lazy._record.become_real(lazy, why)
                self.members, self.inputs = [], []
        if needed.failed is not None:
            raise needed.failed

    def read_kept(self) -> None:
        """Make all lazy tensors real if one of them is a copy."""
        for member in tuple(self.members):
            lazy = member()
            if isinstance(lazy, Recorded) and lazy._record.kept:
                with contextlib.suppress(RuntimeError):  # Whoever uses the copy gets the error.
                    self.become_real("optimizer.step", lazy._record)
                return


class Standing(torch.autograd.Function):
    """Gives a lazy tensor a gradient function, for an `autograd.Function` that is applied to the tensor."""

    @staticmethod
    def forward(ctx: Any, cls: type[Recorded], record: Record, *inputs: Tensor | None) -> Tensor:
        """A tensor without memory, of the class *cls*, whose record is *record*."""
        ctx.make, ctx.autocast, ctx.present = record.make, record.autocast, [x is not None for x in inputs]
        ctx.samples = [remembered.sample for remembered in record.all_remembered()]
        ctx.save_for_backward(*(tensor for tensor in inputs if tensor is not None))
        ctx.set_materialize_grads(False)
        lazy = cast("Recorded", without_memory(cls, record.layout))
        lazy._record = record
        return lazy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs, from running the original again."""
        if gradient is None:
            return None, None, *(None for _ in ctx.present)
        for tensor, sample in zip(ctx.saved_tensors, ctx.samples, strict=True):
            if not has_sample(tensor, sample):
                raise RuntimeError(
                    f"backward() needs the values of a lazy {shape_of(gradient)} from which an autograd.Function "
                    f"computed something, and since then {shape_of(tensor)} was changed: call backward() before that"
                )
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved).detach() if is_present else None for is_present in ctx.present]
        needs = ctx.needs_input_grad[2:]
        wanted = [x.requires_grad_() for x, need in zip(inputs, needs, strict=True) if need and x is not None]
        with torch.enable_grad(), under(ctx.autocast):
            result = ctx.make(*inputs)
        gradients = iter(torch.autograd.grad(result, wanted, gradient, allow_unused=True))
        return None, None, *(next(gradients) if need else None for need in needs)


@contextlib.contextmanager
def as_in_forward() -> Iterator[None]:
    """Record operations as in the call, whatever surrounds the use.

    Tensors are saved for the backward without the hooks of others. Checkpointing counts the tensors that are saved
    inside it. It would miss these when it runs the same code again, because the lazy tensor is real by then.
    """
    hooks: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if saves_are_hooked():
        hooks = saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
    with (
        DisableTorchFunctionSubclass(),
        function_modes_off(),
        disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch.inference_mode(False),
        torch.enable_grad(),
        hooks,
    ):
        yield


def saves_are_hooked() -> bool:
    """Whether hooks, such as those of `torch.utils.checkpoint`, now see the tensors that are saved for a backward."""
    try:
        with disable_saved_tensors_hooks("Nothing is saved here."):
            return False
    except RuntimeError:
        return True


def under(autocast: tuple[str, bool, torch.dtype]) -> torch.autocast:
    """A context with the given *autocast*: a device type, whether it is on, and its dtype."""
    kind, enabled, dtype = autocast
    return torch.autocast(kind, dtype=dtype if enabled else None, enabled=enabled)
