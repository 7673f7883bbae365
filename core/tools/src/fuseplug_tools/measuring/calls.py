"""Records the calls that a running model makes of its targets, and makes them again one by one."""

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
    """One call of a target.

    Attributes:
        args: The positional arguments. If the target is a method, its module comes first.
        kwargs: The keyword arguments.
        seconds: About how long the call took.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seconds: float = 0.0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_in((self.args, dict(self.kwargs)))

    def with_each(self, change: Callable[[Tensor], Tensor]) -> RecordedCall:
        """The same call, with *change* applied to each tensor."""
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
    """A copy of *model* that shares its parameters, so that both fit into memory.

    Args:
        model: Any module that can be copied.
        buffers: Whether the copy shares the buffers, too, instead of copying them.
    """
    tensors = [*model.parameters(), *(model.buffers() if buffers else ())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def recorded(
    model: nn.Module, alike: Mapping[Hashable, Sequence[Patch]], run: Callable[[nn.Module], Any]
) -> dict[Hashable, RecordedCall]:
    """Record the first call of each kind of target while *run* runs an unfused copy of *model*.

    Args:
        model: The model. It is not changed; the copy shares its parameters.
        alike: For each kind, the replacements that would be made of its targets.
        run: Runs a model.

    Returns:
        The call of each kind, its tensors detached from the graph that computed them. Kinds that were not called are
        missing.
    """
    listening = sharing(model, buffers=False)
    for module in listening.modules():
        strip(module, "")
    calls: dict[Hashable, RecordedCall] = {}

    def recorder(kind: Hashable, original: Function) -> Function:
        def record(*args: Any, **kwargs: Any) -> Any:
            if kind in calls:
                return original(*args, **kwargs)
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
    """The original that *replacement* replaces."""
    original: Function = replacement.__wrapped__  # type: ignore[attr-defined]  # functools.wraps left it there
    return original


def make(function: Function, call: RecordedCall, leaves: Sequence[Tensor]) -> None:
    """Call *function* as in *call*, run the backward to *leaves* if there are any, and wait until all is done."""
    with torch.set_grad_enabled(bool(leaves)):
        results = tensors_in(function(*call.args, **call.kwargs))
        if leaves:
            ends = [result for result in results if result.requires_grad]
            torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)
    wait_for(results[0])


def leaves_of(call: RecordedCall, *, method: bool) -> list[Tensor]:
    """The tensors that get gradients from *call*: arguments, and the module's parameters if a *method* is called."""
    parameters = call.args[0].parameters() if method else ()
    return [tensor for tensor in (*call.tensors, *parameters) if tensor.requires_grad]


def wait_for(tensor: Tensor) -> None:
    """Wait until the device of *tensor* has done its work."""
    backend: Any = getattr(torch, tensor.device.type, None)
    if hasattr(backend, "synchronize"):
        backend.synchronize()
