"""The calls that a model makes of what would be replaced: recorded while it runs, and made again one by one."""

from __future__ import annotations

import copy
import time
import types
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fuseplug.patching import class_method, strip
from fuseplug.patching.slots import bind
from fuseplug_verify import rebound

if TYPE_CHECKING:
    from fuseplug.patching import Patch

Function = Callable[..., Any]


class RecordedCall(NamedTuple):
    """How a target was called.

    Attributes:
        args: Its arguments, a module first where it is a method.
        kwargs: Those by keyword.
        seconds: How long that took, about.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seconds: float = 0.0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, dict(self.kwargs)))

    def with_each(self, change: Callable[[Tensor], Tensor]) -> RecordedCall:
        """The same call, with each tensor changed."""
        return self._replace(args=_changed(self.args, change), kwargs=_changed(dict(self.kwargs), change))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in *value*, a tensor or tuples, lists and dicts of them."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """*value* with each tensor in its tuples, lists and dicts changed; objects of other classes stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _changed(item, change) for key, item in value.items()}
    return type(value)(_changed(item, change) for item in value) if type(value) in (tuple, list) else value


def sharing(model: nn.Module, *, buffers: bool = True) -> nn.Module:
    """A copy of *model* with the same parameters: both must fit into memory.

    Args:
        model: Any module that can be copied.
        buffers: Whether the copy has the same buffers, too, and not copies of them.
    """
    tensors = [*model.parameters(), *(model.buffers() if buffers else ())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def recorded(
    model: nn.Module, alike: Mapping[Hashable, Sequence[Patch]], run: Callable[[nn.Module], Any]
) -> dict[Hashable, RecordedCall]:
    """The first call of each kind of target while *run* runs an unfused copy of *model*.

    Args:
        model: The model; nothing of it is changed, and its parameters are those of the copy.
        alike: By kind, the replacements that would be made of such targets.
        run: Runs a model.

    Returns:
        By kind, what it was called with, tensors without the way that they were computed in. Kinds that were not called
        are missing.
    """
    listening = sharing(model, buffers=False)
    for module in listening.modules():
        strip(module, "")
    calls: dict[Hashable, RecordedCall] = {}

    def recorder(kind: Hashable, original: Function) -> Function:
        def record(*args: Any, **kwargs: Any) -> Any:
            if kind in calls:
                return original(*args, **kwargs)
            # Without what its tensors were computed from.
            call = RecordedCall(args, kwargs).with_each(lambda x: x.detach().requires_grad_(x.requires_grad))
            start = time.perf_counter()
            result = original(*args, **kwargs)
            calls[kind] = call._replace(seconds=time.perf_counter() - start)
            return result

        return record

    methods: dict[tuple[str, str], dict[str | None, Function]] = defaultdict(dict)
    for kind, patches in alike.items():
        for patch in patches:
            listener = recorder(kind, original_of(patch.function))
            methods[patch.path, patch.target.method][patch.target.function] = listener
    for (path, method), listeners in methods.items():
        module = listening.get_submodule(path)
        original = cast("types.FunctionType", class_method(module, method))
        functions = {name: listener for name, listener in listeners.items() if name is not None}
        bind(module, method, cast("types.FunctionType", listeners.get(None) or rebound(original, functions)))
    run(listening)
    return calls


def original_of(replacement: Function) -> Function:
    """What *replacement* replaces."""
    original: Function = replacement.__wrapped__  # type: ignore[attr-defined]  # functools.wraps left it there
    return original


def make(function: Function, call: RecordedCall, leaves: Sequence[Tensor]) -> None:
    """Make *call* of *function*, with the backward to *leaves* if there are any, and wait until it is done."""
    with torch.set_grad_enabled(bool(leaves)):
        results = tensors_in(function(*call.args, **call.kwargs))
        if leaves:
            ends = [result for result in results if result.requires_grad]
            torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)
    wait_for(results[0])


def leaves_of(call: RecordedCall, *, method: bool) -> list[Tensor]:
    """What gradients of *call* go to: arguments, and the parameters of the module if a *method* is called."""
    parameters = call.args[0].parameters() if method else ()
    return [tensor for tensor in (*call.tensors, *parameters) if tensor.requires_grad]


def wait_for(tensor: Tensor) -> None:
    """Until the device has done its work."""
    backend: Any = getattr(torch, tensor.device.type, None)
    if hasattr(backend, "synchronize"):
        backend.synchronize()
