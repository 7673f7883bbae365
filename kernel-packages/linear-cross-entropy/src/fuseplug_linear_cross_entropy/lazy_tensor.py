"""A tensor that is computed when something needs its values, and need not be computed if nothing does."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import disable_saved_tensors_hooks, register_multi_grad_hook, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from fuseplug_backends.tracing import is_watched

from .nested import leaves, mapped
from .torch_private import (
    DisableTorchFunctionSubclass,
    disable_current_modes,
    function_modes_off,
    has_foreign_function_mode,
    is_fwd_grad_enabled,
    swap_values,
    temporarily_clear_interpreter_stack,
    without_memory,
    writes_to,
)
from .unchanged import Remembered, has_sample, read_before_steps

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LazyTensor"]

Make = Callable[..., Tensor]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

_ABOUT = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf")
        ),
        *(getattr(Tensor, f"is_{name}").__get__ for name in ("cpu", "cuda", "meta", "nested", "quantized", "sparse")),
        *(getattr(Tensor, name) for name in ("size", "dim", "ndimension", "numel", "nelement")),
        *(getattr(Tensor, name) for name in ("element_size", "is_contiguous", "is_complex", "is_floating_point")),
        *(getattr(Tensor, name) for name in ("get_device", "__len__", "__hash__")),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What is asked about a tensor, and answered without its values. Not strides: meta has others for sizes of 1."""

_CONVERSIONS = frozenset(
    getattr(Tensor, name) for name in ("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "clone")
) | {torch.clone}
"""What gives the same values in another dtype or elsewhere; so does the method that is named like the device."""

_COPIES = frozenset({Tensor.clone, torch.clone, Tensor.detach, torch.detach})
"""What an `autograd.Function` passes a tensor on with, to be called in the backward."""

_GRAD_FN, _BASE = (getattr(Tensor, name).__get__ for name in ("grad_fn", "_base"))
_DEVICE = torch.ops.prim.device.default
_OWN_GRADIENT = frozenset({Tensor.retain_grad, Tensor.output_nr.__get__})  # type: ignore[attr-defined]
_GRADIENTS_OF = frozenset({torch.autograd.grad, torch.autograd.backward})
"""What asks for the gradient of the tensor itself, or of its ``inputs``."""

_RUN_OTHERS = _GRADIENTS_OF | {Tensor.backward, Tensor.__repr__}
"""What runs others' code, a checkpoint's forward for example."""

Hook = Callable[[Tensor], Any]


class Realised(Protocol):
    """What is told that a lazy tensor was computed after all."""

    def real(self, why: str) -> None:
        """Take note of it; *why* is the name of what needed the values."""


class LazyTensor(Tensor):
    """The result of a method, computed when something needs its values.

    It has the shape, strides, dtype and device of the result. It stays lazy while it is asked about these, converted
    on its device, copied, or does what a subclass says in `foreseen`. Anything else makes it real first, together with
    all lazy tensors that come from the same call, in their order: the original's code is run on the inputs of the
    call, and the Python objects become what it returns, plain tensors with the same views, versions and graph. So
    values and gradients are those of the original, bit for bit.

    Two uses raise a `RuntimeError`, because no right answer exists any more: a use of the values after an input of the
    call was changed, and a use of the gradient of the tensor itself after `foreseen` answered without it. A hook on the
    tensor is called in the backward nevertheless, as those that only wait for it need (`fully_shard`).
    """

    _record: _Record

    @classmethod
    def standing_for(cls, make: Make, *inputs: Tensor | None, **facts: Any) -> Self:
        """Make one in the place of ``make(*inputs)``.

        Args:
            make: The original's code. It must give the same for the same inputs, have no side effects, and compute the
                shape, strides and dtype of the result on meta. It is run under the autocast of now.
            *inputs: All tensors that it reads, dense and plain. ``None`` is passed on.
            **facts: What the subclass wants to know later.

        Returns:
            The lazy tensor; ``NotImplemented`` if a result cannot be lazy here, because no gradient is recorded, an
            input is no plain tensor, a mode sees functions, or the call is traced, compiled or transformed.
        """
        tensors = [tensor for tensor in inputs if tensor is not None]
        if (
            not torch.is_grad_enabled()
            or not all(map(_plain, tensors))
            or not any(tensor.requires_grad for tensor in tensors)
            or is_watched()
            or has_foreign_function_mode()
        ):
            return cast("Self", NotImplemented)
        with torch.no_grad():
            layout = make(*(None if tensor is None else tensor.detach().to("meta") for tensor in inputs))
        family = _Family(tensors)
        return cls._new(_Record(family, make, replay=make, inputs=inputs, layout=layout, parent=None, facts=facts))

    @classmethod
    def _new(cls, record: _Record) -> Self:
        new = cast("Self", _Standing.apply(cls, record, *record.inputs))  # type: ignore[no-untyped-call]
        record.family.members.append(weakref.ref(new))
        return new

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the subclass keeps, as given to `standing_for` and `then`."""
        return self._record.facts

    def foreseen(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a call of a torch function with this among its arguments, without the values. For subclasses.

        Args:
            function: As in ``__torch_function__``: ``torch.Tensor.view``, ``torch.nn.functional.cross_entropy``, …
                Every conversion comes as ``Tensor.to(self, dtype)``, with ``copy=True`` if it is the dtype of this, or
                as ``Tensor.clone(self)``, and needs no answer.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What `then` makes, a tuple of such, or anything computed from the inputs in another way; or
            ``NotImplemented``, for the real tensor to be used.
        """
        del function, args, kwargs
        return NotImplemented

    def then(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        into: type[LazyTensor] | None = None,
        **facts: Any,
    ) -> LazyTensor:
        """The lazy result of ``function(*args, **kwargs)``, which is run when something needs the values.

        Args:
            function: A torch function without side effects that gives one tensor.
            args: Its arguments. Other tensors among them are inputs, too.
            kwargs: Its keyword arguments, likewise.
            into: The class of the result; by default that of this.
            **facts: What is otherwise known of the result than of this.

        Returns:
            The lazy tensor; ``NotImplemented`` if one of the other tensors is not dense and plain.

        Raises:
            Exception: What *function* raises on a tensor of this shape.
        """
        call = (tuple(args), dict(kwargs))
        others = {id(leaf): leaf for leaf in leaves(call) if isinstance(leaf, Tensor) and leaf is not self}
        if not all(map(_plain, others.values())):
            return cast("LazyTensor", NotImplemented)
        numbers = {key: number for number, key in enumerate((id(self), *others))}
        # Without this tensor, which would be kept alive.
        form = mapped(lambda leaf: _Place(numbers[id(leaf)]) if id(leaf) in numbers else leaf, call)

        def replay(*tensors: Tensor) -> Tensor:
            arguments, named = mapped(lambda leaf: tensors[leaf.number] if type(leaf) is _Place else leaf, form)
            result: Tensor = function(*arguments, **named)
            return result

        of, further = self._record, tuple(others.values())
        make, autocast, count = of.make, of.autocast, len(of.inputs)

        def whole(*tensors: Tensor | None) -> Tensor:
            with _under(autocast):
                result = make(*tensors[:count])
            return replay(result, *cast("tuple[Tensor, ...]", tensors[count:]))

        with torch.no_grad():
            layout = replay(of.layout, *(tensor.detach().to("meta") for tensor in further))
        if layout is of.layout:
            return self  # As a flatten of one dimension has it.
        inputs, facts = (*of.inputs, *further), {**of.facts, **facts}
        record = _Record(
            of.family, whole, replay=replay, inputs=inputs, layout=layout, parent=self, facts=facts, further=further
        )
        record.kept = function in _COPIES and record.recorded
        return (into or type(self))._new(record)

    def computed(self, why: str = "computed()") -> Tensor:
        """This, once it is real: a plain tensor from then on.

        Raises:
            RuntimeError: If an input was changed since.
        """
        record: _Record | None = vars(self).get("_record")
        if record is not None and record.became is None:
            record.family.become_real(why, record)
        return self

    def check_inputs(self, why: str, since: int = 0, *, waiting: bool = True) -> None:
        """Raise a `RuntimeError` if an input is no longer what it was in the call.

        Args:
            why: What needs the values.
            since: The number of the first input to check.
            waiting: As in `Remembered.change`.
        """
        self._record.check(why, self._record.all_remembered()[since:], waiting=waiting)

    def counted_by(self, told: Realised) -> None:
        """Have *told* know when this, or anything made from it, is computed after all."""
        self._record.family.told = told

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is known without the values, or make all lazy tensors real and run *function*."""
        kwargs = kwargs or {}
        if function in _ABOUT:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        name = _name_of(function)
        lazies = {id(leaf): leaf for leaf in leaves((tuple(args), kwargs)) if isinstance(leaf, LazyTensor)}
        for lazy in lazies.values():
            record: _Record | None = vars(lazy).get("_record")
            if record is None or record.became is not None:
                continue
            with record.family.lock, DisableTorchFunctionSubclass():
                if isinstance(lazy, LazyTensor) and record.became is None:
                    answer = lazy._answer(function, args, kwargs) if len(lazies) == 1 else NotImplemented
                    if answer is not NotImplemented:
                        return answer
                    if not is_fwd_grad_enabled():  # In the forward of an `autograd.Function`, which has its own graph.
                        lazy._forgo()
                    if record.answered and _asks_for_gradient(function, args, kwargs, lazy):
                        raise _never_computed(name, record.layout)
                    lazy.computed(name)

        def now(value: Any) -> Any:
            return value._record.saved(name) if isinstance(value, LazyTensor) else value

        if any(isinstance(lazy, LazyTensor) for lazy in lazies.values()):
            args, kwargs = mapped(now, tuple(args)), mapped(now, dict(kwargs))
        return function(*args, **kwargs)

    def _answer(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What *function* gives without the values; ``NotImplemented`` if it needs them."""
        record = self._record
        if function == _BASE and not record.layout._is_view():
            return None  # `fully_shard` asks.
        if record.answered and function in (_GRAD_FN, Tensor.register_hook):
            layout = record.layout
            return _NoNode(layout) if function == _GRAD_FN else _hooked(record.hooks, layout, *args[1:], **kwargs)
        if is_watched() or not self._record.recorded:
            return NotImplemented
        if not torch.is_grad_enabled():
            passed_on = function in _COPIES and len(args) == 1 and not kwargs and not is_fwd_grad_enabled()
            if passed_on:
                self._forgo()
            return self.then(function, args, kwargs) if passed_on else NotImplemented
        answer = self._converted(function, args, kwargs)
        if answer is NotImplemented:
            answer = self.foreseen(function, args, kwargs)
        if answer is NotImplemented or all(isinstance(leaf, LazyTensor) for leaf in leaves(answer)):
            return answer
        # An accelerator is not waited for in a forward.
        self.check_inputs(_name_of(function), waiting=False)
        lazies = self._forgo() if _has_gradient(answer) else []

        def linked(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad or value.is_leaf:
                return value
            return _Answer.apply(value, *lazies)  # type: ignore[no-untyped-call]

        return mapped(linked, answer)

    def _converted(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """This in another dtype, a copy of it or itself, if *function* is a conversion on this device."""
        if function is Tensor.contiguous and len(args) == 1 and not kwargs and self.is_contiguous():
            return self
        is_conversion = function in _CONVERSIONS or function is getattr(Tensor, self.device.type, None)
        if not is_conversion or not args or args[0] is not self or "memory_format" in kwargs:
            return NotImplemented
        # What it does to a tensor without elements, it does to this.
        empty = torch.empty((0,) * self.dim(), dtype=self.dtype, device=self.device)
        converted = function(empty, *args[1:], **kwargs)
        if converted is empty:
            return self
        if not isinstance(converted, Tensor) or converted.device != self.device:
            return NotImplemented
        as_it_is = converted.dtype == self.dtype
        to: tuple[Any, Any, Any] = (Tensor.to, (self, converted.dtype), {"copy": True} if as_it_is else {})
        if function in _COPIES:
            to = Tensor.clone, (self,), {}
        answer = self.foreseen(*to)
        return self.then(*to, into=LazyTensor) if answer is NotImplemented else answer

    def _forgo(self) -> list[LazyTensor]:
        """Note that a result does without this and all that it was made from: their gradients are never known."""
        lazies: list[LazyTensor] = []
        lazy: Tensor | None = self
        while isinstance(lazy, LazyTensor):
            lazy._record.answered = True
            lazies.append(lazy)
            lazy = lazy._record.parent
        return lazies

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> Any:
        """Use the values, where an operation is called below autograd, from C++."""
        if func is _DEVICE:
            return args[0]._record.device
        written = itertools.compress(args, writes_to(func))
        if func.namespace == "aten" and any(isinstance(argument, LazyTensor) for argument in written):
            raise RuntimeError(f"{func} writes into a lazy tensor from C++: call .detach() on it before that")

        def value_of(value: Any) -> Any:
            return value._record.value(value, str(func)) if isinstance(value, LazyTensor) else value

        return func(*mapped(value_of, args), **mapped(value_of, kwargs))


@dataclass(frozen=True)
class _Place:
    """Where a call takes its tensor of a *number*."""

    number: int


class _Record:
    """What is known of a lazy tensor.

    Attributes:
        family: That of all lazy tensors of one call.
        make: Computes it from *inputs*.
        replay: Computes it from the tensor that it was made from, and *further* ones.
        inputs: All that it depends on.
        layout: It, on meta.
        parent: What it was made from, if not from the call itself.
        facts: What the subclass keeps.
        autocast: Of the moment when it was made.
        recorded: Whether its graph is that of *make*. Made in an `autograd.Function`, it gets that function's.
        kept: Whether somebody copied it to keep it.
        answered: Whether a result was computed without it.
        device: Where it is.
        hooks: What is called in the backward of such a result.
        values: What it is below autograd, while it becomes real.
        became: The real tensor, for what still refers to the lazy one: what was saved for a backward.
        failed: Why it could not become real with the others.
    """

    def __init__(
        self,
        family: _Family,
        make: Make,
        *,
        replay: Make,
        inputs: Sequence[Tensor | None],
        layout: Tensor,
        parent: LazyTensor | None,
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
        """What its inputs were, while it is lazy."""
        before = self.family.inputs if self.parent is None else self.parent._record.all_remembered()
        return [*before, *self.remembered]

    def check(self, why: str, remembered: Iterable[Remembered], *, waiting: bool = True) -> None:
        """Raise a `RuntimeError` if one of *remembered* was changed."""
        for source in remembered:
            change = source.change(waiting=waiting)
            if change:
                raise RuntimeError(
                    f"{why} needs the values of a lazy {_shape(self.layout)}, which were not computed in the forward, "
                    f"and now one of its inputs, {_shape(source.tensor)}, {change}: use it before optimizer.step() and "
                    "before parameters are sharded again (.detach() is such a use), or undo the kernel"
                )

    def become_real(self, lazy: LazyTensor, why: str) -> None:
        """Make *lazy*, whose record this is, the tensor that it stands for."""
        if isinstance(self.parent, LazyTensor):
            self.failed = self.parent._record.failed
            return
        try:
            self.check(why, self.remembered)
        except RuntimeError as error:
            self.failed = error
            return
        tensors = self.inputs if self.parent is None else (self.parent, *(source.tensor for source in self.remembered))
        with torch.set_grad_enabled(self.recorded), _under(self.autocast):
            real = self.replay(*tensors)
        if not self.recorded:
            # By `__torch_dispatch__`, so that the gradient goes through what passed it on.
            self.values = real
            real = torch.clone(lazy)
        elif any(real is tensor for tensor in tensors):
            real = real.view_as(real)
        del lazy._record
        real.__class__ = type(lazy)
        cast("Tensor", lazy).__class__ = _Answered if self.answered and real.requires_grad else Tensor
        swap_values(lazy, real)
        cast("LazyTensor", real)._record = self
        self.became, self.version = lazy, lazy._version
        if isinstance(lazy, _Answered):
            lazy._hooks, lazy._layout = self.hooks, self.layout
            if self.hooks:
                lazy._call_hooks()
        self.parent, self.values, self.inputs, self.facts, self.remembered = None, None, (), {}, []

    def saved(self, why: str) -> Tensor:
        """The real tensor, for a lazy one that was saved for a backward before it became real."""
        if self.became is None:
            raise self.failed or RuntimeError(f"{why} needs the values of a lazy {_shape(self.layout)}, which are gone")
        if self.became._version != self.version:
            raise RuntimeError(
                f"{why} needs a lazy {_shape(self.layout)} as an autograd.Function saved it, and it was written into "
                "since: save a clone of it"
            )
        return self.became

    def value(self, lazy: LazyTensor, why: str) -> Tensor:
        """The values of *lazy*, whose record this is, below autograd."""
        if self.values is not None:
            return self.values
        with DisableTorchFunctionSubclass():
            if self.became is None:
                lazy._forgo()
                self.family.become_real(why, self)
            return self.saved(why).detach()


class _Family:
    """All lazy tensors that come from one call; one of them becomes real with all others.

    Attributes:
        inputs: Those of the call.
        members: The lazy tensors, in the order in which they were made.
        lock: Whoever makes them real.
        told: Who is told.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self.inputs = [Remembered(tensor) for tensor in inputs]
        self.members: list[weakref.ref[LazyTensor]] = []
        self.lock = threading.RLock()
        self.told: Realised | None = None
        read_before_steps(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def become_real(self, why: str, needed: _Record) -> None:
        """Make all lazy tensors real, for *why* needs that of the record *needed*."""
        with self.lock, _as_in_forward():
            if needed.failed is None:
                needed.check(why, self.inputs)
                if self.told is not None:
                    self.told.real(why)
                for member in self.members:
                    lazy = member()
                    if isinstance(lazy, LazyTensor):
                        lazy._record.become_real(lazy, why)
                self.members, self.inputs = [], []
        if needed.failed is not None:
            raise needed.failed

    def read_kept(self) -> None:
        """Make them real if somebody keeps a copy."""
        for member in tuple(self.members):
            lazy = member()
            if isinstance(lazy, LazyTensor) and lazy._record.kept:
                with contextlib.suppress(RuntimeError):  # Who uses it, is told.
                    lazy.computed("optimizer.step")
                return


class _Standing(torch.autograd.Function):
    """Gives the lazy tensor a gradient function, for an `autograd.Function` that is applied to it."""

    @staticmethod
    def forward(ctx: Any, cls: type[LazyTensor], record: _Record, *inputs: Tensor | None) -> Tensor:
        ctx.make, ctx.autocast, ctx.present = record.make, record.autocast, [x is not None for x in inputs]
        ctx.samples = [remembered.sample for remembered in record.all_remembered()]
        ctx.save_for_backward(*(tensor for tensor in inputs if tensor is not None))
        ctx.set_materialize_grads(False)
        lazy = cast("LazyTensor", without_memory(cls, record.layout))
        lazy._record = record
        return lazy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, *(None for _ in ctx.present)
        for tensor, sample in zip(ctx.saved_tensors, ctx.samples, strict=True):
            if not has_sample(tensor, sample):
                raise RuntimeError(
                    f"backward() needs the values of a lazy {_shape(gradient)} from which an autograd.Function "
                    f"computed something, and since then {_shape(tensor)} was changed: call backward() before that"
                )
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved).detach() if is_present else None for is_present in ctx.present]
        needs = ctx.needs_input_grad[2:]
        wanted = [x.requires_grad_() for x, need in zip(inputs, needs, strict=True) if need and x is not None]
        with torch.enable_grad(), _under(ctx.autocast):
            result = ctx.make(*inputs)
        gradients = iter(torch.autograd.grad(result, wanted, gradient, allow_unused=True))
        return None, None, *(next(gradients) if need else None for need in needs)


class _Answer(torch.autograd.Function):
    """Ties a result to the lazy tensors that it was computed without: who waits for their gradients is heard."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *lazies: LazyTensor) -> Tensor:
        ctx.lazies = [(weakref.ref(lazy), lazy._record.layout, lazy._record.hooks) for lazy in lazies]
        return result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for lazy, layout, hooks in ctx.lazies:
            with DisableTorchFunctionSubclass():
                # As ``backward(inputs=[logits])`` has it, which asks nobody on torch 2.12 and older.
                retained = getattr(lazy(), "retains_grad", False)
            if retained:
                raise _never_computed("backward()", layout)
            _call_hooks(hooks, layout, gradient.device)
        return gradient, *(None for _ in ctx.lazies)


class _Answered(Tensor):
    """A lazy tensor that became real after a result was computed without it: its gradient is never known."""

    _hooks: OrderedDict[int, Hook]
    _layout: Tensor

    def _call_hooks(self) -> None:
        """Have the hooks called for the part of the gradient that is known, too."""
        hooks, layout = self._hooks, self._layout
        with DisableTorchFunctionSubclass():
            cast("Any", self).register_hook(lambda gradient: _call_hooks(hooks, layout, gradient.device))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what asks for the gradient; do all else."""
        kwargs = kwargs or {}
        for tensor in [leaf for leaf in leaves((tuple(args), kwargs)) if isinstance(leaf, _Answered)]:
            if _asks_for_gradient(function, args, kwargs, tensor):
                raise _never_computed(_name_of(function), tensor._layout)
        if function == _GRAD_FN:
            return _NoNode(args[0]._layout)
        if function in _RUN_OTHERS:
            # Others' code runs in these: what is switched off here must be on there.
            result = function(*mapped(_plainly, tuple(args)), **mapped(_plainly, dict(kwargs)))
            return _with_node_of(args[0], result) if function is Tensor.__repr__ else result
        with DisableTorchFunctionSubclass():
            if function is Tensor.__reduce_ex__:
                return args[0].__reduce_ex__(*args[1:])
            if function is Tensor.register_hook:
                if not args[0]._hooks:
                    args[0]._call_hooks()
                return _hooked(args[0]._hooks, args[0]._layout, *args[1:], **kwargs)
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> Any:
        """Is never called: Dynamo takes what has none for a tensor of its own kind, and cannot compile it."""
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain tensor."""
        return _plainly(self).__reduce_ex__(protocol)


class _NoNode:
    """In the place of a gradient function that is never called: there is one, as `DistributedDataParallel` asks."""

    def __init__(self, layout: Tensor) -> None:
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        raise _never_computed(f"grad_fn.{name}", self._layout)


def _plainly(value: Any) -> Any:
    """The plain tensor that shares values and graph with *value*, if that is an answered one."""
    if not isinstance(value, _Answered):
        return value
    with DisableTorchFunctionSubclass(), torch.enable_grad():
        return value.as_subclass(Tensor)


def _with_node_of(tensor: _Answered, text: str) -> str:
    """*text*, which was printed of an alias, with the gradient function of *tensor*, if it has one."""
    with DisableTorchFunctionSubclass():
        node = tensor.grad_fn
    shown = "requires_grad=True" if node is None else f"grad_fn=<{type(node).__name__}>"
    return text.replace("grad_fn=<AliasBackward0>", shown)


class _Unknown(Tensor):
    """Stands for a gradient that was never computed, where a hook only waits for it."""

    _device: torch.device

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is about the gradient; refuse the rest."""
        with DisableTorchFunctionSubclass():
            if function in _ABOUT:
                return function(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what is called below autograd."""
        if func is _DEVICE:
            return args[0]._device
        gradient = next(leaf for leaf in leaves((tuple(args), kwargs)) if isinstance(leaf, _Unknown))
        raise _never_computed(_name_of(func), gradient)


def _hooked(hooks: OrderedDict[int, Hook], layout: Tensor, hook: Hook) -> RemovableHandle:
    if getattr(hook, "__module__", None) == register_multi_grad_hook.__module__:
        # It asks in the backward whether the gradient function runs.
        raise _never_computed(register_multi_grad_hook.__name__, layout)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _call_hooks(hooks: Mapping[int, Hook], layout: Tensor, device: torch.device) -> None:
    """Call *hooks* with a gradient that is not known."""
    for hook in tuple(hooks.values()):
        unknown = cast("_Unknown", without_memory(_Unknown, layout))
        unknown._device = device
        changed = hook(unknown)
        if changed is not None and changed is not unknown:
            raise _never_computed(f"{hook} changes it, so it", layout)


def _asks_for_gradient(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
    """Whether *function* asks for the gradient of *tensor* itself."""
    if function in _GRADIENTS_OF:
        inputs = kwargs["inputs"] if "inputs" in kwargs else args[1:2]
        return any(leaf is tensor for leaf in leaves(inputs))
    return function in _OWN_GRADIENT


def _has_gradient(answer: Any) -> bool:
    """Whether *answer* may have a gradient, that of numbers of words being none."""
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves(answer))


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else name


def _never_computed(what: str, layout: Tensor) -> RuntimeError:
    return RuntimeError(
        f"{what} asks for the gradient of a lazy {_shape(layout)}, from which a result was computed without it: ask "
        "before that, call .detach() on it before that, or undo the kernel"
    )


@contextlib.contextmanager
def _as_in_forward() -> Iterator[None]:
    """Operations are recorded as in the call, whatever surrounds the use.

    What is saved for the backward is kept as it is: checkpointing counts what is saved inside it, and would not find
    it again when it runs the same code with a tensor that has been computed by then.
    """
    hooks: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if _saves_are_hooked():
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


def _saves_are_hooked() -> bool:
    """Whether somebody, `torch.utils.checkpoint` for one, sees here what is saved for a backward."""
    try:
        with disable_saved_tensors_hooks("Nothing is saved here."):
            return False
    except RuntimeError:
        return True


def _under(autocast: tuple[str, bool, torch.dtype]) -> torch.autocast:
    kind, enabled, dtype = autocast
    return torch.autocast(kind, dtype=dtype if enabled else None, enabled=enabled)


def _plain(tensor: Tensor) -> bool:
    """Whether *tensor* has values of its own that nobody else answers for."""
    return type(tensor) in _PLAIN and not tensor.is_inference() and tensor.device.type != "meta"


def _shape(tensor: Tensor) -> str:
    with DisableTorchFunctionSubclass():
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
