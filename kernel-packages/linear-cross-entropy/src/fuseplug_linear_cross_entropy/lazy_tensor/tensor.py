"""A tensor that is computed only when something needs its values."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fuseplug_backends.tracing import is_watched

from ..torch_private import (
    DisableTorchFunctionSubclass,
    has_foreign_function_mode,
    is_fwd_grad_enabled,
    writes_to,
)
from .functions import ABOUT, BASE, CONVERSIONS, COPIES, DEVICE, GRAD_FN, asks_for_gradient, name_of
from .gradients import Answer, NoNode, hooked, never_computed
from .nested import leaves, mapped
from .records import Family, Make, Realised, Record, Recorded, Standing, saves_are_hooked, under

if TYPE_CHECKING:
    from typing import Self

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class LazyTensor(Recorded):
    """The result of a method, computed only when something needs its values.

    It has the shape, strides, dtype and device of the result. It stays lazy while code asks about these, converts it on
    its device, copies it, or does something that a subclass answers in `foreseen`. Any other use first makes it real,
    together with all lazy tensors that come from the same call, in the order in which they were made: the original's
    code runs on the inputs of the call, and the Python objects become the tensors that it returns, plain ones with the
    same views, versions and graph. So values and gradients are those of the original, bit for bit.

    Two uses raise a `RuntimeError`, because no right answer exists any more: using the values after an input of the
    call was changed, and using the gradient of the tensor itself after `foreseen` answered without it. The backward
    still calls hooks on the tensor, because some hooks only wait for the gradient (`fully_shard`).
    """

    @classmethod
    def standing_for(cls, make: Make, *inputs: Tensor | None, **facts: Any) -> Self:
        """Make a lazy tensor in the place of ``make(*inputs)``.

        Args:
            make: The original's code. It must give the same result for the same inputs, have no side effects, and
                compute the shape, strides and dtype of the result on meta. It will run under the present autocast.
            *inputs: All tensors that *make* reads, dense and plain. ``None`` is passed on.
            **facts: Data that the subclass needs later.

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
        family = Family(tensors)
        return cls._new(Record(family, make, replay=make, inputs=inputs, layout=layout, parent=None, facts=facts))

    @classmethod
    def _new(cls, record: Record) -> Self:
        new = cast("Self", Standing.apply(cls, record, *record.inputs))  # type: ignore[no-untyped-call]
        record.family.members.append(weakref.ref(new))
        return new

    @property
    def facts(self) -> Mapping[str, Any]:
        """The data of the subclass, as given to `standing_for` and `then`."""
        return self._record.facts

    def foreseen(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer, without the values, a call of a torch function that takes this tensor. For subclasses.

        Args:
            function: As in ``__torch_function__``: ``torch.Tensor.view``, ``torch.nn.functional.cross_entropy``, …
                Every conversion comes as ``Tensor.to(self, dtype)``, with ``copy=True`` if this tensor has the dtype,
                or as ``Tensor.clone(self)``. Conversions need no answer.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            A result of `then`, a tuple of these, or anything computed from the inputs in another way;
            ``NotImplemented`` if the real tensor is needed.
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
        """The lazy result of ``function(*args, **kwargs)``, which runs when something needs the values.

        Args:
            function: A torch function without side effects that returns one tensor.
            args: Its arguments. Other tensors among them are inputs, too.
            kwargs: Its keyword arguments, likewise.
            into: The class of the result; by default the class of this tensor.
            **facts: The data of the result, where they differ from those of this tensor.

        Returns:
            The lazy tensor; ``NotImplemented`` if one of the other tensors is not dense and plain.

        Raises:
            Exception: Anything that *function* raises on a tensor of this shape.
        """
        call = (tuple(args), dict(kwargs))
        others = {id(leaf): leaf for leaf in leaves(call) if isinstance(leaf, Tensor) and leaf is not self}
        if not all(map(_plain, others.values())):
            return cast("LazyTensor", NotImplemented)
        numbers = {key: number for number, key in enumerate((id(self), *others))}
        # The form leaves this tensor out, because it would keep the tensor alive.
        form = mapped(lambda leaf: _Place(numbers[id(leaf)]) if id(leaf) in numbers else leaf, call)

        def replay(*tensors: Tensor) -> Tensor:
            arguments, named = mapped(lambda leaf: tensors[leaf.number] if type(leaf) is _Place else leaf, form)
            result: Tensor = function(*arguments, **named)
            return result

        of, further = self._record, tuple(others.values())
        make, autocast, count = of.make, of.autocast, len(of.inputs)

        def whole(*tensors: Tensor | None) -> Tensor:
            with under(autocast):
                result = make(*tensors[:count])
            return replay(result, *cast("tuple[Tensor, ...]", tensors[count:]))

        with torch.no_grad():
            layout = replay(of.layout, *(tensor.detach().to("meta") for tensor in further))
        if layout is of.layout:
            return self  # For example, for a flatten of one dimension.
        inputs, facts = (*of.inputs, *further), {**of.facts, **facts}
        record = Record(
            of.family, whole, replay=replay, inputs=inputs, layout=layout, parent=self, facts=facts, further=further
        )
        record.kept = function in COPIES and record.recorded
        return (into or type(self))._new(record)

    def computed(self, why: str = "computed()") -> Tensor:
        """Make this tensor real, and return it: a plain tensor from now on.

        Raises:
            RuntimeError: If an input has changed since the call.
        """
        record: Record | None = vars(self).get("_record")
        if record is not None and record.became is None:
            record.family.become_real(why, record)
        return self

    def check_inputs(self, why: str, since: int = 0, *, waiting: bool = True) -> None:
        """Raise a `RuntimeError` if an input is no longer what it was in the call.

        Args:
            why: The name of the function that needs the values.
            since: The number of the first input to check.
            waiting: As in `Remembered.change`.
        """
        self._record.check(why, self._record.all_remembered()[since:], waiting=waiting)

    def counted_by(self, told: Realised) -> None:
        """Tell *told* when this tensor, or one that was made from it, is computed after all."""
        self._record.family.told = told

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer without the values, or make all lazy tensors real and run *function*."""
        kwargs = kwargs or {}
        if function in ABOUT:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        name = name_of(function)
        lazies = {id(leaf): leaf for leaf in leaves((tuple(args), kwargs)) if isinstance(leaf, LazyTensor)}
        for lazy in lazies.values():
            record: Record | None = vars(lazy).get("_record")
            if record is None or record.became is not None:
                continue
            with record.family.lock, DisableTorchFunctionSubclass():
                if isinstance(lazy, LazyTensor) and record.became is None:
                    answer = lazy._answer(function, args, kwargs) if len(lazies) == 1 else NotImplemented
                    if answer is not NotImplemented:
                        return answer
                    if not is_fwd_grad_enabled():  # In the forward of an `autograd.Function`, which has its own graph.
                        lazy._forgo()
                    if record.answered and asks_for_gradient(function, args, kwargs, lazy):
                        raise never_computed(name, record.layout)
                    lazy.computed(name)

        def now(value: Any) -> Any:
            return value._record.saved(name) if isinstance(value, LazyTensor) else value

        if any(isinstance(lazy, LazyTensor) for lazy in lazies.values()):
            args, kwargs = mapped(now, tuple(args)), mapped(now, dict(kwargs))
        return function(*args, **kwargs)

    def _answer(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of *function* without the values; ``NotImplemented`` if it needs them."""
        record = self._record
        if function == BASE and not record.layout._is_view():
            return None  # `fully_shard` asks.
        if record.answered and function in (GRAD_FN, Tensor.register_hook):
            layout = record.layout
            return NoNode(layout) if function == GRAD_FN else hooked(record.hooks, layout, *args[1:], **kwargs)
        # A checkpoint that began after the call may run again when the values are known, and would then save less.
        if is_watched() or not record.recorded or (not record.family.hooked and saves_are_hooked()):
            return NotImplemented
        if not torch.is_grad_enabled():
            passed_on = function in COPIES and len(args) == 1 and not kwargs and not is_fwd_grad_enabled()
            if passed_on:
                self._forgo()
            return self.then(function, args, kwargs) if passed_on else NotImplemented
        answer = self._converted(function, args, kwargs)
        if answer is NotImplemented:
            answer = self.foreseen(function, args, kwargs)
        if answer is NotImplemented or all(isinstance(leaf, LazyTensor) for leaf in leaves(answer)):
            return answer
        # A forward does not wait for an accelerator.
        self.check_inputs(name_of(function), waiting=False)
        lazies = self._forgo() if _has_gradient(answer) else []

        def linked(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad or value.is_leaf:
                return value
            return Answer.apply(value, *lazies)  # type: ignore[no-untyped-call]

        return mapped(linked, answer)

    def _converted(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """This tensor in another dtype, a copy of it, or itself, if *function* is a conversion on its device."""
        if function is Tensor.contiguous and len(args) == 1 and not kwargs and self.is_contiguous():
            return self
        is_conversion = function in CONVERSIONS or function is getattr(Tensor, self.device.type, None)
        if not is_conversion or not args or args[0] is not self or "memory_format" in kwargs:
            return NotImplemented
        # A conversion does to this tensor what it does to one without elements.
        empty = torch.empty((0,) * self.dim(), dtype=self.dtype, device=self.device)
        converted = function(empty, *args[1:], **kwargs)
        if converted is empty:
            return self
        if not isinstance(converted, Tensor) or converted.device != self.device:
            return NotImplemented
        as_it_is = converted.dtype == self.dtype
        to: tuple[Any, Any, Any] = (Tensor.to, (self, converted.dtype), {"copy": True} if as_it_is else {})
        if function in COPIES:
            to = Tensor.clone, (self,), {}
        answer = self.foreseen(*to)
        return self.then(*to, into=LazyTensor) if answer is NotImplemented else answer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> Any:
        """Use the values if C++ calls an operation below autograd."""
        if func is DEVICE:
            return args[0]._record.device
        written = itertools.compress(args, writes_to(func))
        if func.namespace == "aten" and any(isinstance(argument, LazyTensor) for argument in written):
            raise RuntimeError(f"{func} writes into a lazy tensor from C++: call .detach() on it before that")

        def value_of(value: Any) -> Any:
            return value._record.value(value, str(func)) if isinstance(value, LazyTensor) else value

        return func(*mapped(value_of, args), **mapped(value_of, kwargs))


@dataclass(frozen=True)
class _Place:
    """A place in a call's arguments, for the tensor with this *number*."""

    number: int


def _has_gradient(answer: Any) -> bool:
    """Whether *answer* may have a gradient; the numbers of words have none."""
    return any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves(answer))


def _plain(tensor: Tensor) -> bool:
    """Whether *tensor* has values of its own, and no subclass answers for it."""
    return type(tensor) in _PLAIN and not tensor.is_inference() and tensor.device.type != "meta"
