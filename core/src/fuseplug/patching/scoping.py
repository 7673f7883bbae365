"""Puts a `Scope` around a method: the calls during which a replacement is in force."""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..contract import Scope
from .mark import Mark
from .placing import Binding

_entered: contextvars.ContextVar[frozenset[Hashable]] = contextvars.ContextVar("fuseplug_scopes", default=frozenset())

entered: Callable[[], frozenset[Hashable]] = _entered.get
"""Returns the keys of the scopes that the running code is in. Each thread has its own."""


class Around:
    """One scope, as it goes around a method.

    Attributes:
        mark: Identifies the kernel of the scope.
        scope: Says which calls enter the scope.
        key: What `entered` contains inside the scope.
    """

    def __init__(self, mark: Mark, scope: Scope) -> None:
        self.mark = mark
        self.scope = scope
        self.key = key_of(mark.kernel_id, scope)

    def __call__(
        self, scopes: frozenset[Hashable], module: nn.Module, arguments: Mapping[str, Any]
    ) -> frozenset[Hashable]:
        """*scopes*, with this one if it holds for the call, else without it: the call may be inside another call."""
        # DataParallel makes replicas for one call. Their parameters are not leaves.
        holds = not getattr(module, "_is_replica", False) and self._holds(module, arguments)
        if holds == (self.key in scopes):
            return scopes
        return scopes | {self.key} if holds else scopes - {self.key}

    def _holds(self, module: nn.Module, arguments: Mapping[str, Any]) -> bool:
        try:
            return bool(self.scope.holds(module, arguments))
        except Exception:  # noqa: BLE001 - third-party code raised; the model's own call goes on
            return False


def key_of(kernel_id: str, scope: Scope) -> Hashable:
    """What `entered` contains inside *scope*."""
    return kernel_id, scope


def put_around(
    method: types.FunctionType, original: types.FunctionType, name: str, arounds: Sequence[Around]
) -> types.FunctionType:
    """Make a function that enters *arounds* and calls *method*.

    Args:
        method: The function to call.
        original: The class's own function, which has the signature of the calls. If *method* is this function, each
            call goes to the function that the class has at that time.
        name: The name of the method.
        arounds: At least one scope.
    """
    bind = Binding(original)

    @functools.wraps(original)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        now = getattr(type(args[0]), name, original) if method is original else method
        if torch.compiler.is_compiling():
            return now(*args, **kwargs)
        if (bound := bind(args, kwargs)) is None:  # The method's own error says better what is wrong.
            return now(*args, **kwargs)
        before = inside = _entered.get()
        for around in arounds:
            inside = around(inside, args[0], {**bound[0], **bound[1]})
        if inside is before:
            return now(*args, **kwargs)
        token = _entered.set(inside)
        try:
            return now(*args, **kwargs)
        finally:
            _entered.reset(token)

    # Pickle finds a bound method by this name, and some decorators leave a different one.
    scoped.__name__ = name
    return cast("types.FunctionType", scoped)
