"""A tensor that is computed when something needs its values, and need not be computed if nothing does."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from .torch_private import (
    DisableTorchFunctionSubclass,
    are_functorch_transforms_active,
    get_tracing_state,
    in_forward_mode,
    is_fwd_grad_enabled,
    len_torch_dispatch_stack,
    tree_leaves,
    tree_map,
    without_memory,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LazyTensor"]

Make = Callable[..., Tensor]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

_ABOUT = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "layout",
                "ndim",
                "requires_grad",
                "grad_fn",
                "is_leaf",
                "_base",
                "is_cpu",
                "is_cuda",
                "is_meta",
                "is_mps",
                "is_nested",
                "is_quantized",
                "is_sparse",
                "is_xla",
                "itemsize",
                "nbytes",
            )
        ),
        *(
            getattr(Tensor, name)
            for name in (
                "size",
                "stride",
                "dim",
                "ndimension",
                "numel",
                "nelement",
                "element_size",
                "is_contiguous",
                "is_complex",
                "is_floating_point",
                "get_device",
                "storage_offset",
                "__len__",
            )
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What is asked about a tensor and needs none of its values."""

_GRADIENTS = frozenset({Tensor.retain_grad, torch.autograd.grad})
"""What asks for the gradient of the tensor itself."""

_COPIES = frozenset({Tensor.clone, torch.clone, Tensor.detach, torch.detach})
"""What an `autograd.Function` passes a tensor on with, to be called in the backward."""

Hook = Callable[[Tensor], Any]


class Realised(Protocol):
    """What is told that a lazy tensor was computed after all."""

    def real(self, why: str) -> None:
        """Take note of it; *why* is the name of what needed the values."""


class LazyTensor(Tensor):
    """The result of a method, computed when something needs its values.

    It has the shape, strides, dtype and device of the result, and its gradient function. A subclass says in `foreseen`
    what it answers without the values. At every other use it becomes the real tensor: the original's code is run then,
    once, on the inputs of the call and under the autocast of the call. So the values and gradients are those of the
    original, bit for bit.

    Two uses raise a `RuntimeError`, because no right answer exists any more: a use of the values after an input of the
    call was changed in place, and a use of the gradient of the tensor itself after `foreseen` answered without it. A
    hook on the tensor is called in the backward nevertheless, as those that only wait for it need (`fully_shard`).
    """

    _make: Make
    _replay: Callable[..., Tensor]
    _inputs: tuple[Tensor | None, ...]
    _versions: tuple[int | None, ...]
    _layout: Tensor
    _autocast: tuple[bool, torch.dtype]
    _parent: LazyTensor | None
    _real: Tensor | None
    _real_version: int
    _recorded: bool
    _answered: bool
    _hooks: OrderedDict[int, Hook]
    _told: Realised | None
    facts: Mapping[str, Any]
    """What the subclass keeps, as given to `standing_for` and `then`."""

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
            input is no plain tensor, or the call is traced, compiled or transformed.
        """
        given = [each for each in inputs if each is not None]
        if (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or not all(map(_plain, given))
            or not any(each.requires_grad for each in given)
            or get_tracing_state() is not None
            or are_functorch_transforms_active()
            or in_forward_mode()
            or len_torch_dispatch_stack()
        ):
            return cast("Self", NotImplemented)
        with torch.no_grad():
            layout = make(*(None if each is None else each.detach().to("meta") for each in inputs))
        return cls._new(make, inputs, layout, None, facts)

    @classmethod
    def _new(
        cls,
        make: Make,
        inputs: Sequence[Tensor | None],
        layout: Tensor,
        parent: LazyTensor | None,
        facts: Mapping[str, Any],
    ) -> Self:
        given = [each for each in inputs if each is not None]
        kind = given[0].device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        new = cast("Self", _Standing.apply(cls, make, layout, autocast, *inputs))  # type: ignore[no-untyped-call]
        new._make, new._inputs, new._layout, new._autocast = make, tuple(inputs), layout, autocast
        new._versions = _versions(inputs)
        new._parent, new._real, new._real_version, new._answered, new._told = parent, None, 0, False, None
        # Without, it is made in an `autograd.Function`, which gives it a gradient function of its own.
        new._recorded, new._hooks = torch.is_grad_enabled(), OrderedDict()
        new.facts = facts
        return new

    def foreseen(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Answer a call of a torch function with this among its arguments, without the values. For subclasses.

        Args:
            function: As in ``__torch_function__``: ``torch.Tensor.float``, ``torch.nn.functional.cross_entropy``, …
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            What `then` makes, or anything computed from the inputs in another way; or ``NotImplemented``, for the real
            tensor to be used.
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
        others = [each for each in tree_leaves((tuple(args), dict(kwargs))) if isinstance(each, Tensor)]
        further = tuple({id(each): each for each in others if each is not self}.values())
        if not all(map(_plain, further)):
            return cast("LazyTensor", NotImplemented)

        def replay(tensor: Tensor, *beside: Tensor) -> Tensor:
            instead = dict(zip(map(id, (self, *further)), (tensor, *beside), strict=True))

            def put(value: Any) -> Any:
                return instead.get(id(value), value)

            result: Tensor = function(*tree_map(put, tuple(args)), **tree_map(put, dict(kwargs)))
            return result

        with torch.no_grad():
            layout = replay(self._layout, *(each.detach().to("meta") for each in further))
        make, inner, count = self._make, self._under, len(self._inputs)

        def whole(*tensors: Tensor | None) -> Tensor:
            with inner():
                made = make(*tensors[:count])
            return replay(made, *cast("tuple[Tensor, ...]", tensors[count:]))

        new = (into or type(self))._new(whole, (*self._inputs, *further), layout, self, {**self.facts, **facts})
        new._replay, new._versions = replay, (*self._versions, *_versions(further))
        return new

    @property
    def is_real(self) -> bool:
        """Whether the values were needed, here or in a tensor that this was made from."""
        with DisableTorchFunctionSubclass():
            return self._real is not None or (self._parent is not None and self._parent.is_real)

    def computed(self, why: str = "computed()") -> Tensor:
        """The tensor itself, with its gradient function. It is computed once.

        Raises:
            RuntimeError: If an input was changed since, in place or by freeing its memory; or if the tensor that this
                was made from was written into since.
        """
        with DisableTorchFunctionSubclass():
            if self._real is None:
                self._real = self._computed(why)
                self._real_version = self._real._version
                if self._answered and self._real.requires_grad:
                    _call_back(self._real, [self])
            return self._real

    def _computed(self, why: str) -> Tensor:
        with _as_in_training(), self._under():
            if not self._recorded:
                # By `__torch_dispatch__`, so that the gradient goes through what made it.
                return torch.clone(self)
            if self._parent is not None:
                made = self._parent.computed(why)
                result = self._replayed(made, why)
                if made._version != self._parent._real_version and not _shares_memory(result, made):
                    raise RuntimeError(
                        f"{why} needs the values of a lazy {_shape(self)}, and they are gone: the tensor that it was "
                        "made from was written into since. Use it before that, or call .computed() on it there"
                    )
                return result
            self.check_inputs(why)
            self._tell(why)
            return self._make(*self._inputs)

    def _replayed(self, made: Tensor, why: str) -> Tensor:
        """This, from the values *made* of what it was made from."""
        since = 0 if self._parent is None else len(self._parent._inputs)
        self.check_inputs(why, since)
        return self._replay(made, *self._inputs[since:])

    def check_inputs(self, why: str, since: int = 0) -> None:
        """Raise a `RuntimeError` if an input is no longer what it was in the call.

        Args:
            why: What needs the values.
            since: The number of the first input to check.
        """
        for each, version in zip(self._inputs[since:], self._versions[since:], strict=True):
            if each is None:
                continue
            gone = each.numel() and each.untyped_storage().size() == 0
            if each._version != version or gone:
                raise RuntimeError(
                    f"{why} needs the values of a lazy {_shape(self)}, which were not computed in the forward, and now "
                    f"one of its inputs, {_shape(each)}, {'was freed' if gone else 'was changed in place'}: use it "
                    "before optimizer.step() and before parameters are sharded again, call .computed() on it there, or "
                    "undo the kernel"
                )

    def counted_by(self, told: Realised) -> None:
        """Have *told* know when this, or anything made from it, is computed after all."""
        self._told = told

    def _tell(self, why: str) -> None:
        if self._told is not None:
            self._told.real(why)

    @contextlib.contextmanager
    def _under(self) -> Iterator[None]:
        """The autocast of the call."""
        enabled, dtype = self._autocast
        with DisableTorchFunctionSubclass():
            kind = self.device.type
        with torch.autocast(kind, dtype=dtype if enabled else None, enabled=enabled):
            yield

    def _note_answer(self, answer: Any) -> None:
        """Take note of *answer*, which was computed without the values, here and in all that this was made from."""
        concerned: list[LazyTensor] = []
        each: LazyTensor | None = self
        while each is not None:
            each._answered = True
            concerned.append(each)
            each = each._parent
        for result in tree_leaves(answer):
            if isinstance(result, Tensor) and result.requires_grad and not result.is_leaf:
                _call_back(result, concerned)

    def _hooked(self, hook: Hook) -> RemovableHandle:
        """Have *hook* called in the backward of what was computed without this."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is about the tensor, ask `foreseen`, or use the real tensor."""
        kwargs = kwargs or {}
        if function in _ABOUT:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        lazies = [each for each in tree_leaves((tuple(args), dict(kwargs))) if isinstance(each, LazyTensor)]
        name = _name_of(function)
        first = lazies[0]
        if function in _GRADIENTS and any(each._answered for each in lazies):
            raise RuntimeError(_never_computed(name, _shape(first)))
        if function is Tensor.register_hook and first._answered:
            return first._hooked(*args[1:], **kwargs)
        if not first.is_real and first._recorded:
            with DisableTorchFunctionSubclass():
                answer: Any = NotImplemented
                if torch.is_grad_enabled():
                    answer = first.foreseen(function, args, kwargs)
                elif function in _COPIES and len(args) == 1 and not kwargs and not is_fwd_grad_enabled():
                    answer = first.then(function, args, kwargs)
                if not (answer is NotImplemented or isinstance(answer, LazyTensor)):
                    first._note_answer(answer)
            if answer is not NotImplemented:
                return answer

        def made_real(value: Any) -> Any:
            return value.computed(name) if isinstance(value, LazyTensor) else value

        return function(*tree_map(made_real, tuple(args)), **tree_map(made_real, dict(kwargs)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> Any:
        """Use the values, where an operation is called below autograd: from C++, or in an `autograd.Function`."""

        def value_of(value: Any) -> Any:
            return value._value(str(func)) if isinstance(value, LazyTensor) else value

        return func(*tree_map(value_of, args), **tree_map(value_of, kwargs))

    def _value(self, why: str) -> Tensor:
        """The values alone: the gradient goes through this tensor's own gradient function."""
        if self._real is None:
            with torch.no_grad(), self._under():
                if self._parent is not None:
                    return self._replayed(self._parent._value(why), why)
                self.check_inputs(why)
                self._tell(why)
                return self._make(*self._inputs)
        if self._real._version != self._real_version:
            raise RuntimeError(
                f"{why} needs a lazy {_shape(self)} that was written into, below autograd, where the write has no "
                "gradient: call .computed() on it first"
            )
        return self._real.detach()


class _Standing(torch.autograd.Function):
    """Gives the lazy tensor a gradient function, for code that uses it below ``__torch_function__``."""

    @staticmethod
    def forward(
        ctx: Any,
        cls: type[LazyTensor],
        make: Make,
        layout: Tensor,
        autocast: tuple[bool, torch.dtype],
        *inputs: Tensor | None,
    ) -> Tensor:
        given = [each for each in inputs if each is not None]
        ctx.make, ctx.autocast, ctx.present = make, autocast, [each is not None for each in inputs]
        ctx.save_for_backward(*given)
        return without_memory(cls, layout, given[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved).detach() if there else None for there in ctx.present]
        needs = ctx.needs_input_grad[4:]
        wanted = [each.requires_grad_() for each, need in zip(inputs, needs, strict=True) if need and each is not None]
        enabled, dtype = ctx.autocast
        kind = gradient.device.type
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype if enabled else None, enabled=enabled):
            result = ctx.make(*inputs)
        found = iter(torch.autograd.grad(result, wanted, gradient, allow_unused=True))
        return None, None, None, None, *(next(found) if need else None for need in needs)


class _Unknown(Tensor):
    """Stands for a gradient that was never computed, where a hook only waits for it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is about the gradient; refuse the rest."""
        if function in _ABOUT:
            with DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what is called below autograd."""
        found = next(each for each in tree_leaves((tuple(args), kwargs)) if isinstance(each, _Unknown))
        raise RuntimeError(_never_computed(_name_of(func), _shape(found)))


def _call_back(result: Tensor, lazies: Sequence[LazyTensor]) -> None:
    """Have the hooks on *lazies* called in the backward of *result*, with gradients that are not known."""
    of = [(each._hooks, each._layout) for each in lazies]
    device = result.device

    def called(_: Tensor) -> None:
        for hooks, layout in of:
            for hook in tuple(hooks.values()):
                unknown = without_memory(_Unknown, layout, device)
                found = hook(unknown)
                if found is not None and found is not unknown:
                    raise RuntimeError(_never_computed(f"{hook} changes it, so it", _shape(layout)))

    result.register_hook(called)  # type: ignore[no-untyped-call]


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", function))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else name


def _never_computed(what: str, shape: str) -> str:
    return (
        f"{what} asks for the gradient of a lazy {shape}, from which a result was computed without it: ask before "
        "that, call .computed() on it before that, or undo the kernel"
    )


@contextlib.contextmanager
def _as_in_training() -> Iterator[None]:
    """Gradients are recorded as in the call, whatever surrounds the use.

    What is saved for the backward is kept as it is: checkpointing counts what is saved inside it, and would not find
    it again when it runs the same code with a tensor that has been computed by then.
    """

    def same(tensor: Tensor) -> Tensor:
        return tensor

    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(same, same):
        yield


def _plain(tensor: Tensor) -> bool:
    """Whether *tensor* has values of its own that nobody else answers for."""
    return type(tensor) in _PLAIN and not tensor.is_inference() and tensor.device.type != "meta"


def _versions(tensors: Iterable[Tensor | None]) -> tuple[int | None, ...]:
    """How often each was written into."""
    return tuple(None if each is None else each._version for each in tensors)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _shape(tensor: Tensor) -> str:
    with DisableTorchFunctionSubclass():
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
