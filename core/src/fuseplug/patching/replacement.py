"""The function that replaces a method or function: the kernel's adapter behind a guard."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fuseplug_verify import Adapter, ProcessLock, rebound, said_by

from ..contract import Compute, Target
from ..fallback import this_thread
from ..torch_private import traced_away
from .accepts import Accepts
from .guard import OUTSIDE, Guard, Test, is_tracing, original_now
from .lookups import same_as
from .mark import Mark
from .placing import Placing
from .scoping import Around, entered, put_around
from .tally import Count, Tally, listeners, running, tell

# Keyed by function, not stored as attributes: functools.wraps copies attributes onto a wrapper around our function.
_replacements: weakref.WeakKeyDictionary[Callable[..., Any], Replacement] = weakref.WeakKeyDictionary()
_composed: weakref.WeakKeyDictionary[Callable[..., Any], dict[Target, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_in_use: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()
_attributed: weakref.WeakValueDictionary[int, types.FunctionType] = weakref.WeakValueDictionary()
_making = ProcessLock()


DECLINED = "the kernel's adapter leaves it to the original"


class Replacement:
    """The state of one replacement: mark, guards, and call counts.

    Attributes:
        mark: Identifies the replacement as ours.
        guards: The comparisons for each way of calling.
        watch: What the guards compare besides the call itself.
        tally: How often the replacement was called, and with what outcome.
    """

    def __init__(self, original: Callable[..., Any], mark: Mark, accepts: Accepts) -> None:
        self.mark = mark
        self._accepts = accepts
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

    def why_original(self, args: Sequence[Any], kwargs: Mapping[str, Any], refusal: str = "") -> str:
        """Why the original computed a call; *refusal* is what the kernel raised, or ``""``."""
        return self.why_not(args, kwargs) or (f"the kernel refuses its arguments: {refusal}" if refusal else DECLINED)

    def note_original(
        self, count: Count, holds: bool | None, refusal: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Report a call that the original computed to the listeners, and to *count* if it is watched.

        Args:
            count: Where the call is counted.
            holds: The answer of `Guard.holds` for the call.
            refusal: What the kernel raised, or ``""``.
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.
        """
        why = functools.partial(self.why_original, args, kwargs, refusal)
        if listeners:
            tell(count, why)
        if count.watcher is None:
            return
        gains, scope = self._accepts.gains, self._accepts.scope
        if holds and not refusal:
            count.reasons.setdefault(DECLINED)
        elif scope is not None and scope not in entered():
            count.reasons.setdefault(OUTSIDE)
        elif holds is not None and not is_tracing():
            # For an untried way of calling, the main input is unknown.
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if not gains or any(map(gains.reaches, tensors)):
                count.refuse(why)

    def main_input(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The main input of a call; ``None`` if `why_not` gives a reason against the call."""
        placed = None if self.why_not(args, kwargs) else self.place(args, kwargs)
        return None if placed is None else placed.values[self._accepts.main]

    def why_never(self, module: Any) -> str:
        """Why no call on *module* can reach the kernel; ``""`` if calls can."""
        return self.guards[0].why_never(module)


def replacement(
    original: Callable[..., Any], adapter: Adapter, compute: Compute, mark: Mark, accepts: Accepts
) -> Callable[..., Any]:
    """The function to put in the place of *original*; the same object for the same arguments, as long as it is in use.

    ``torch.compile`` compiles a shared function once, but separate equal functions once each.
    """
    key = (original, adapter, compute, mark, accepts)
    with _making:
        if key not in _in_use:
            about = Replacement(original, mark, accepts)
            fused = adapter.bind(compute)
            if accepts.watch.unhooked:
                fused = _counting_uses(fused, about)
            function = _guarded(original, fused, about, accepts)
            _replacements[function] = about
            _in_use[key] = function
            return function
        return _in_use[key]


def compose(method: types.FunctionType, parts: Mapping[Target, Callable[..., Any]]) -> types.FunctionType:
    """The function to bind as *method*: its replacement, or its copy with functions replaced; inside any scopes."""
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
    # Pickle finds a bound method by this name, and some decorators leave a different one.
    copy.__name__ = next(iter(parts)).method
    attributed = _counted_by_module(copy, method)
    _composed[attributed] = dict(parts)
    return attributed


def _counted_by_module(copy: types.FunctionType, original: types.FunctionType) -> types.FunctionType:
    """*copy*, wrapped so that `running` holds its module during each call, as long as *original* is the class's own.

    Returns the same object for the same copy, so that torch.compile compiles it once.
    """
    compiling, name, same = torch.compiler.is_dynamo_compiling, copy.__name__, same_as(original)

    @functools.wraps(copy)
    def attributed(*args: Any, **kwargs: Any) -> Any:
        # Somebody may have put another method into the class since, of which there is no copy.
        method = copy if same(now := getattr(type(args[0]), name)) else now
        if compiling():
            return method(*args, **kwargs)
        before, running.module = running.module, args[0]
        try:
            return method(*args, **kwargs)
        finally:
            running.module = before

    return _attributed.setdefault(id(copy), cast("types.FunctionType", attributed))


def replacements_in(function: Any) -> dict[Target, Callable[..., Any]]:
    """The replacements that *function*, made by `compose`, consists of; empty if it is not ours."""
    if not isinstance(function, types.FunctionType):
        return {}
    if function in _composed:
        return dict(_composed[function])
    return {_replacements[function].mark.target: function} if function in _replacements else {}


def replacement_of(part: Callable[..., Any]) -> Replacement:
    """The state of the replacement *part*."""
    return _replacements[part]


def mark_of(part: Callable[..., Any]) -> Mark:
    """The mark of *part*, a replacement or an `Around`."""
    return part.mark if isinstance(part, Around) else _replacements[part].mark


def _guarded(
    original: Callable[..., Any], fused: Callable[..., Any], about: Replacement, accepts: Accepts
) -> Callable[..., Any]:
    place, tally, compiling = about.place, about.tally, torch.compiler.is_compiling
    tests = [guard.holds for guard in about.guards]
    as_tried = {call.count: test for call, test in zip(accepts.calls, tests, strict=True) if not call.names}
    one_way = len(tests) == 1 == len(as_tried)
    bound = about.mark.target.function is None
    now = original_now(original, about.mark.target, accepts)
    uncompiled, count_original, note_tracing = accepts.uncompiled, tally.original, _noting_traces(tally)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        # A constant for the compiler. If the original is to be traced, nothing of the guard is traced.
        traced = compiling() and note_tracing()
        test = None if kwargs else as_tried.get(len(args))
        positional: Sequence[Any] | None = None
        named: Mapping[str, Any] = {}
        holds: bool | None = False
        if traced and uncompiled:
            pass
        elif test is not None and (holds := test(args)):
            positional = args
        elif holds is not None and (test is None or not one_way) and (placed := place(args, kwargs)) is not None:
            number, values, named = placed
            if holds := tests[number](values):
                positional = values[: accepts.calls[number].count]
        result, refusal = _computed(fused, positional, named, traced)
        if result is not NotImplemented:
            if not traced:
                tally.fused(args[0] if bound else running.module)
            return result
        if not traced:
            count = count_original(args[0] if bound else running.module)
            if count.watcher is not None or listeners:
                about.note_original(count, holds, refusal, args, kwargs)
        # Passed on as the caller wrote it: a function that the original wraps may look at the keywords.
        return now(args)(*args, **kwargs)

    return functools.wraps(original)(_small_first(replaced, now, about, accepts, frozenset(as_tried)))


def _small_first(
    guarded: Callable[..., Any], now: Test, about: Replacement, accepts: Accepts, numbers: frozenset[int]
) -> Callable[..., Any]:
    """*guarded*, behind one comparison that sends the smallest calls to the original.

    While a model decodes, the processor's caches no longer hold what Python needs for a call, and each further function
    that a call enters takes about a microsecond.
    """
    main, smallest, counts = accepts.main, accepts.gains.smallest, about.tally.counts
    method, bound = about.mark.target.method, about.mark.target.function is None
    # The cheapest test that Dynamo can answer. Other tracers pass tensors that are not plain.
    compiling = torch.compiler.is_dynamo_compiling

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if (
            not compiling()
            and not kwargs
            and len(args) in numbers
            and type(x := args[main]) is Tensor
            and x.numel() < smallest
            and not listeners
            and (count := counts.get(id(args[0] if bound else running.module))) is not None
        ):
            count.original += 1
            return (getattr(type(args[0]), method) if bound else now(args))(*args)
        return guarded(*args, **kwargs)

    return replaced if smallest else guarded


def _computed(
    fused: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any], traced: bool
) -> tuple[Any, str]:
    """The result of *fused*; ``NotImplemented`` if *args* is ``None`` or, with the error, if it raises `ValueError`."""
    if args is None:
        return NotImplemented, ""
    if traced:
        # After a graph break Dynamo resumes, but not inside a try.
        return fused(*args, **kwargs), ""
    this_thread.declined = False  # a call of the function outside any model may have left it true
    try:
        return fused(*args, **kwargs), ""
    except ValueError as error:  # for example, a weight has another shape: then the original is right
        return NotImplemented, said_by(error)


def _noting_traces(tally: Tally) -> Callable[[], bool]:
    """A function for traced calls, which runs once during tracing, notes that, and returns ``True``."""

    @traced_away
    def note() -> bool:
        tally.traced = True
        return True

    return note


def _counting_uses(fused: Callable[..., Any], about: Replacement) -> Callable[..., Any]:
    """*fused*, with lazy results that count what needs their values."""
    bound = about.mark.target.function is None

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = fused(*args, **kwargs)
        if hasattr(type(result), "counted_by"):
            result.counted_by(about.tally.of(args[0] if bound else running.module))
        return result

    return counted
