"""The function that replaces a method or function: the kernel's adapter behind a guard."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..accepts import Accepts
from ..contract import Adapter, Compute, Target
from ..functional import this_thread
from ..lazy_tensor import LazyTensor
from ..rebind import rebound
from ..torch_private import traced_away
from .guard import Guard, module_of
from .mark import Mark
from .placing import Placing
from .scoping import Around, put_around
from .short_way import with_short_way
from .tally import Tally, listeners, tell

# By identity, not as attributes: functools.wraps copies those onto what somebody else puts around ours.
_replacements: weakref.WeakKeyDictionary[Callable[..., Any], Replacement] = weakref.WeakKeyDictionary()
_composed: weakref.WeakKeyDictionary[Callable[..., Any], dict[Target, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_made: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()
_making = threading.Lock()


DECLINED = "the kernel's adapter leaves it to the original"


class Replacement:
    """Everything that belongs to one replacement.

    Attributes:
        mark: Identifies it as ours.
        guards: The comparisons for each way of calling.
        watch: What is compared beside the call itself.
        tally: How often it was called, and with what outcome.
    """

    def __init__(self, original: Callable[..., Any], mark: Mark, accepts: Accepts) -> None:
        self.mark = mark
        self._main = accepts.main
        self.watch = accepts.watch
        self.place = Placing(original, accepts.calls, accepts.extra)
        self.guards = [Guard(call, original, mark.target, mark.device_type, accepts) for call in accepts.calls]
        self.tally = Tally()

    def why_not(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why a call goes to the original; ``""`` if it does not. The module is the first argument."""
        placed = self.place(args, kwargs)
        if placed is None:
            return "it is called in a way that was not tried"
        return self.guards[placed.number].why_not(placed.values)

    def why_original(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Why the original computed a call."""
        return self.why_not(args, kwargs) or DECLINED

    def main_input(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The main input of a call; ``None`` if `why_not` has something against the call."""
        placed = None if self.why_not(args, kwargs) else self.place(args, kwargs)
        return None if placed is None else placed.values[self._main]

    def why_never(self, module: Any) -> str:
        """Why no call on *module* can reach the kernel; ``""`` if calls can."""
        return self.guards[0].why_never(module)


def replacement(
    original: Callable[..., Any], adapter: Adapter, compute: Compute, mark: Mark, accepts: Accepts
) -> Callable[..., Any]:
    """The function to put in the place of *original*; the same object for the same arguments, as long as it is in use.

    ``torch.compile`` compiles a shared function once. It compiles equal functions once each.
    """
    key = (original, adapter, compute, mark, accepts)
    with _making:
        if key not in _made:
            about = Replacement(original, mark, accepts)
            fused = _afresh(adapter.bind(compute))
            if accepts.watch.unhooked:
                fused = _counting_uses(fused, about)
            made = _guarded(original, fused, about, accepts)
            _replacements[made] = about
            _made[key] = made
            return made
        return _made[key]


def compose(method: types.FunctionType, parts: Mapping[Target, Callable[..., Any]]) -> types.FunctionType:
    """What goes into the slot of *method*: its replacement, or its copy with functions replaced; and what is around."""
    arounds = [part for part in parts.values() if isinstance(part, Around)]
    within = {target: part for target, part in parts.items() if not isinstance(part, Around)}
    inner = _composed_within(method, within) if within else method
    if not arounds:
        return inner
    outer = put_around(inner, method, next(iter(parts)).method, arounds)
    _composed[outer] = dict(parts)
    return outer


def _composed_within(method: types.FunctionType, parts: Mapping[Target, Callable[..., Any]]) -> types.FunctionType:
    for target, part in parts.items():
        if target.function is None:
            part.__name__ = target.method
            return cast("types.FunctionType", part)
    copy = rebound(method, {str(target.function): part for target, part in parts.items()})
    # A pickle finds a bound method by this name, and some decorators leave another.
    copy.__name__ = next(iter(parts)).method
    _composed[copy] = dict(parts)
    return copy


def replacements_in(function: Any) -> dict[Target, Callable[..., Any]]:
    """The replacements that *function*, made by `compose`, consists of; empty if it is not ours."""
    if not isinstance(function, types.FunctionType):
        return {}
    if function in _composed:
        return dict(_composed[function])
    return {_replacements[function].mark.target: function} if function in _replacements else {}


def replacement_of(part: Callable[..., Any]) -> Replacement:
    """Everything that belongs to the replacement *part*."""
    return _replacements[part]


def mark_of(part: Callable[..., Any]) -> Mark:
    """The mark of a replacement, or of what goes around a method."""
    return part.mark if isinstance(part, Around) else _replacements[part].mark


def _guarded(
    original: Callable[..., Any], fused: Callable[..., Any], about: Replacement, accepts: Accepts
) -> Callable[..., Any]:
    place, tally, compiling = about.place, about.tally, torch.compiler.is_compiling
    holds = [guard.holds for guard in about.guards]
    as_tried = {call.count: test for call, test in zip(accepts.calls, holds, strict=True) if not call.names}
    one_way = len(holds) == 1 == len(as_tried)
    bound = about.mark.target.function is None
    method, name = about.mark.target.method, about.mark.target.function
    space = {name: original} if accepts.space is None else accepts.space.held
    python_module, attribute = module_of(space, name), method if bound else str(name)
    uncompiled, count_original, note_tracing = accepts.uncompiled, tally.original, _noting_traces(tally)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        # For the compiler this is a constant: where the original is to be traced, nothing of the guard is.
        traced = compiling() and note_tracing()
        test = None if kwargs else as_tried.get(len(args))
        result = NotImplemented
        held: bool | None = False
        if traced and uncompiled:
            pass
        elif test is not None and (held := test(args)):
            result = fused(*args)
        elif held is not None and (test is None or not one_way) and (placed := place(args, kwargs)) is not None:
            number, values, named = placed
            if holds[number](values):
                result = fused(*values[: accepts.calls[number].count], **named)
        if result is not NotImplemented:
            if not traced:
                tally.fused(args[0] if bound else None)
            return result
        if not traced:
            count = count_original(args[0] if bound else None)
            if listeners:
                tell(count, functools.partial(about.why_original, args, kwargs))
        # What stands there now, if somebody put another there; and the call as it was made: what the original wraps
        # may look at its keywords.
        owner = type(args[0]) if bound else python_module
        now = space[name] if owner is None else getattr(owner, attribute)
        return now(*args, **kwargs)

    outermost = with_short_way(replaced, about.guards[0], tally, [*as_tried], bound=bound)
    return functools.wraps(original)(outermost)


def _afresh(fused: Callable[..., Any]) -> Callable[..., Any]:
    """*fused*, of which `Tally.fused` counts whether its function declined; one that was called by hand may have."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            this_thread.declined = False
        return fused(*args, **kwargs)

    return computed


def _noting_traces(tally: Tally) -> Callable[[], bool]:
    """What a traced call calls, once while it is traced; true."""

    @traced_away
    def note() -> bool:
        tally.traced = True
        return True

    return note


def _counting_uses(fused: Callable[..., Any], about: Replacement) -> Callable[..., Any]:
    """*fused*, whose lazy results count what needs their values."""
    bound = about.mark.target.function is None

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = fused(*args, **kwargs)
        if isinstance(result, LazyTensor):
            result.counted_by(about.tally.of(args[0] if bound else None))
        return result

    return counted
