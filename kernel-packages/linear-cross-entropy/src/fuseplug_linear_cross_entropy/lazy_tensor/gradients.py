"""Stand-ins for gradients that are never known: those of lazy tensors without which a result was computed."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from ..torch_private import DisableTorchFunctionSubclass, without_memory
from .functions import ABOUT, DEVICE, GRAD_FN, RUN_OTHERS, asks_for_gradient, name_of
from .nested import leaves, mapped

Hook = Callable[[Tensor], Any]


class Answer(torch.autograd.Function):
    """Ties a result to the lazy tensors that it was computed without, so that its backward calls their hooks."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *lazies: Any) -> Tensor:
        """A copy of *result*, which was computed without *lazies*."""
        ctx.lazies = [(weakref.ref(lazy), lazy._record.layout, lazy._record.hooks) for lazy in lazies]
        return result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the result. The hooks of the lazy tensors are called."""
        for lazy, layout, hooks in ctx.lazies:
            with DisableTorchFunctionSubclass():
                # Set by ``backward(inputs=[logits])``, which on torch 2.12 and older does not ask the logits.
                retained = getattr(lazy(), "retains_grad", False)
            if retained:
                raise never_computed("backward()", layout)
            call_hooks(hooks, layout, gradient.device)
        return gradient, *(None for _ in ctx.lazies)


class Answered(Tensor):
    """A lazy tensor that became real after a result was computed without it: its gradient is never known."""

    _hooks: OrderedDict[int, Hook]
    _layout: Tensor

    def take_over(self, hooks: OrderedDict[int, Hook], layout: Tensor) -> None:
        """Have the backward of this tensor call *hooks*, too: those of the lazy tensor with this *layout*."""
        self._hooks, self._layout = hooks, layout
        if hooks:
            self._call_hooks()

    def _call_hooks(self) -> None:
        """Have the hooks called for the known part of the gradient, too."""
        hooks, layout = self._hooks, self._layout
        with DisableTorchFunctionSubclass():
            cast("Any", self).register_hook(lambda gradient: call_hooks(hooks, layout, gradient.device))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse functions that ask for the gradient; run all others."""
        kwargs = kwargs or {}
        for tensor in [leaf for leaf in leaves((tuple(args), kwargs)) if isinstance(leaf, Answered)]:
            if asks_for_gradient(function, args, kwargs, tensor):
                raise never_computed(name_of(function), tensor._layout)
        if function == GRAD_FN:
            return NoNode(args[0]._layout)
        if function in RUN_OTHERS:
            # These run code of others, which needs `__torch_function__`: it must not be off there.
            result = function(*mapped(_plainly, tuple(args)), **mapped(_plainly, dict(kwargs)))
            return _with_node_of(args[0], result) if function is Tensor.__repr__ else result
        with DisableTorchFunctionSubclass():
            if function is Tensor.__reduce_ex__:
                return args[0].__reduce_ex__(*args[1:])
            if function is Tensor.register_hook:
                if not args[0]._hooks:
                    args[0]._call_hooks()
                return hooked(args[0]._hooks, args[0]._layout, *args[1:], **kwargs)
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> Any:
        """Is never called. Without it, Dynamo takes the class for a tensor of its own kind, and cannot compile it."""
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this as a plain tensor."""
        return _plainly(self).__reduce_ex__(protocol)


class NoNode:
    """Stands for a gradient function that is never called: `DistributedDataParallel` asks whether there is one."""

    def __init__(self, layout: Tensor) -> None:
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        raise never_computed(f"grad_fn.{name}", self._layout)


def _plainly(value: Any) -> Any:
    """*value*; for an `Answered`, the plain tensor that shares its values and graph."""
    if not isinstance(value, Answered):
        return value
    with DisableTorchFunctionSubclass(), torch.enable_grad():
        return value.as_subclass(Tensor)


def _with_node_of(tensor: Answered, text: str) -> str:
    """*text*, the repr of an alias of *tensor*, with the gradient function of *tensor* in it, if it has one."""
    with DisableTorchFunctionSubclass():
        node = tensor.grad_fn
    shown = "requires_grad=True" if node is None else f"grad_fn=<{type(node).__name__}>"
    return text.replace("grad_fn=<AliasBackward0>", shown)


class Unknown(Tensor):
    """Stands for a gradient that was never computed, where a hook only waits for it."""

    _device: torch.device

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions about the gradient that need no values; refuse the rest."""
        with DisableTorchFunctionSubclass():
            if function in ABOUT:
                return function(*args, **(kwargs or {}))
        return cls.__torch_dispatch__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse operations that are called below autograd."""
        if func is DEVICE:
            return args[0]._device
        gradient = next(leaf for leaf in leaves((tuple(args), kwargs)) if isinstance(leaf, Unknown))
        raise never_computed(name_of(func), gradient)


def hooked(hooks: OrderedDict[int, Hook], layout: Tensor, hook: Hook) -> RemovableHandle:
    """Add *hook* to *hooks*, those of the lazy tensor with this *layout*."""
    if getattr(hook, "__module__", None) == register_multi_grad_hook.__module__:
        # Such a hook asks in the backward whether the gradient function runs.
        raise never_computed(register_multi_grad_hook.__name__, layout)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def call_hooks(hooks: Mapping[int, Hook], layout: Tensor, device: torch.device) -> None:
    """Call *hooks* with an unknown gradient."""
    for hook in tuple(hooks.values()):
        unknown = cast("Unknown", without_memory(Unknown, layout))
        unknown._device = device
        changed = hook(unknown)
        if changed is not None and changed is not unknown:
            raise never_computed(f"{hook} changes it, so it", layout)


def never_computed(what: str, layout: Tensor) -> RuntimeError:
    """The error to raise if *what* asks for the gradient of the lazy tensor with this *layout*."""
    return RuntimeError(
        f"{what} asks for the gradient of a lazy {shape_of(layout)}, but a result was computed without that tensor: "
        "ask, or call .detach() on the tensor, before that, or undo the kernel"
    )


def shape_of(tensor: Tensor) -> str:
    """The dtype and shape of *tensor*, for a person."""
    with DisableTorchFunctionSubclass():
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
