"""Finds the method of an instance, below any wrappers, and says whose it is."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..contract import Target
from .hooked import describe, is_own, name_of
from .mark import Mark
from .replacement import mark_of, replacements_in
from .wrappers import Held, reached


def attributes_of(module: object) -> dict[str, Any]:
    """The attributes of *module* itself, read without its class's ``__getattribute__``."""
    return object.__getattribute__(module, "__dict__")  # type: ignore[no-any-return]


def class_method(module: nn.Module, method: str) -> types.FunctionType | None:
    """The function under the name *method* in *module*'s class; ``None`` if that is not a plain function."""
    function = getattr(type(module), method, None)
    return function if isinstance(function, types.FunctionType) else None


def function_of(module: nn.Module, method: str) -> types.FunctionType | None:
    """The class's own function or our replacement that the instance holds for *method*, bound or below wrappers."""
    end = _end(module, method)
    return None if end is None else _function(end.value)


def is_original(module: nn.Module, method: str) -> bool:
    """Whether a call of *method* runs the class's own function, and another function can be put in its place.

    The instance may hold the bound method after a round trip through pickle or after hooks were removed; that is not a
    patch. A wrapper may hold the bound method, too. A wrapper that holds the plain function may serve many modules, so
    it is not looked through.
    """
    if method not in module.__dict__:
        return True
    end = _end(module, method)
    return end is not None and is_own(end.value, module, class_method(module, method))


def our_replacements(module: nn.Module, method: str) -> dict[Target, Callable[..., Any]]:
    """Our replacements on *method* of this instance, by target."""
    return replacements_in(function_of(module, method))


def our_marks(module: nn.Module) -> dict[Target, Mark]:
    """The marks of our replacements on all methods of this instance, by target."""
    methods = [name for name in attributes_of(module) if class_method(module, name) is not None]
    return {target: mark_of(part) for method in methods for target, part in our_replacements(module, method).items()}


def wrapped_by(module: nn.Module, method: str) -> str:
    """For a message: the outermost *method* put on this instance; ``""`` if it is ours or the class's own."""
    value = module.__dict__.get(method)
    ours = value is None or replacements_in(_function(value)) or is_own(value, module, class_method(module, method))
    return "" if ours else describe(module, method)


def computes_past(module: nn.Module, method: str, path: str) -> str:
    """For a message: a method put on this instance that itself reads the weight at *path*; ``""`` if there is none.

    Trainers that compute a loss without the logits put on a method like that. The module at *path* is then not called.
    """
    original, words = class_method(module, method), {path.rpartition(".")[2], "get_output_embeddings"}

    def reads(value: Any) -> bool:
        function = _function(value)
        if not isinstance(function, types.FunctionType) or function is original or replacements_in(function):
            return False
        return "weight" in function.__code__.co_names and not words.isdisjoint(function.__code__.co_names)

    top = Held(module.__dict__.get(method), None)
    end = next((place for place in reached(top, module, reads) if place.called), None)
    return "" if end is None else name_of(end.value)


def bind(module: nn.Module, method: str, function: types.FunctionType | None) -> bool:
    """Put *function* in place of the class's own or of our replacement; ``None`` takes our replacement off.

    Returns:
        Whether *function* was put there. It is not if a wrapper holds our replacement as a plain function, because
        copies of the model share that wrapper.
    """
    now, after = function_of(module, method), function or class_method(module, method)
    if after is None or now is after:
        return True
    # Straight into __dict__: nn.Module's and its subclasses' __setattr__ may do more than set.
    attributes, bound = module.__dict__, types.MethodType(after, module)
    for place in [*_ends(module, method), *_remembered(module)]:
        if place.put is None or not _is_bound(module, place.value) or place.value.__func__ is not now:
            continue
        # A wrapper that only remembers the class's own keeps it. One that remembers our replacement gets the new one.
        if place.called or replacements_in(now):
            place.put(bound)
    attributes.setdefault(method, bound)
    if function is None and attributes[method] is bound:
        del attributes[method]
    return function_of(module, method) is not now


def _end(module: nn.Module, method: str) -> Held | None:
    """Where a call of *method* ends. If wrappers hold both our replacement and the class's own, that is ours."""

    def rank(end: Held) -> tuple[bool, bool]:
        return not replacements_in(_function(end.value)), not _is_bound(module, end.value)

    called = (end for end in _ends(module, method) if end.called)
    return min(called, key=rank, default=None)


def _ends(module: nn.Module, method: str) -> Iterator[Held]:
    """The places where a call of *method* may end, and those that its wrappers only remember."""
    original = class_method(module, method)

    def is_end(value: Any) -> bool:
        function = _function(value)
        ours = isinstance(function, types.FunctionType) and (function is original or bool(replacements_in(function)))
        return ours and (function is value or _is_bound(module, value))

    if method in module.__dict__:
        top = Held(module.__dict__[method], functools.partial(module.__dict__.__setitem__, method))
        yield from reached(top, module, is_end)


def _remembered(module: nn.Module) -> list[Held]:
    """All attributes of the instance itself, because some wrappers keep the method that they wrap there."""
    state = module.__dict__
    return [Held(value, functools.partial(state.__setitem__, name), called=False) for name, value in state.items()]


def _is_bound(module: nn.Module, value: Any) -> bool:
    return type(value) is types.MethodType and value.__self__ is module


def _function(value: Any) -> Any:
    return value.__func__ if type(value) is types.MethodType else value
