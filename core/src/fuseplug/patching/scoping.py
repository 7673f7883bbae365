"""The calls during which a replacement is in force: `Scope`, put around a method."""

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
"""The scopes in which this runs, by their keys. Each thread has its own."""


class Around:
    """What goes around a method for one scope.

    Attributes:
        mark: Whose it is.
        scope: When it is entered.
        key: What is in `entered` inside.
    """

    def __init__(self, mark: Mark, scope: Scope) -> None:
        self.mark = mark
        self.scope = scope
        self.key = key_of(mark.kernel_id, scope)

    def __call__(
        self, scopes: frozenset[Hashable], module: nn.Module, arguments: Mapping[str, Any]
    ) -> frozenset[Hashable]:
        """*scopes* with this one, if it holds for a call; without it, if not: the call may be inside another."""
        # DataParallel makes replicas for one call; their parameters are no leaves.
        holds = not getattr(module, "_is_replica", False) and self._holds(module, arguments)
        if holds == (self.key in scopes):
            return scopes
        return scopes | {self.key} if holds else scopes - {self.key}

    def _holds(self, module: nn.Module, arguments: Mapping[str, Any]) -> bool:
        try:
            return bool(self.scope.holds(module, arguments))
        except Exception:  # noqa: BLE001 - a third party's; the model's own call goes on
            return False


def key_of(kernel_id: str, scope: Scope) -> Hashable:
    """What is in `entered` while *scope* is."""
    return kernel_id, scope


def put_around(
    method: types.FunctionType, original: types.FunctionType, name: str, arounds: Sequence[Around]
) -> types.FunctionType:
    """Make *method*, with *arounds* entered during its calls.

    Args:
        method: What is called.
        original: The class's own, with the signature of the calls. If *method* is the same, what the class has when it
            is called is called.
        name: Of the method.
        arounds: At least one.
    """
    bind = Binding(original)

    @functools.wraps(original)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        now = getattr(type(args[0]), name, original) if method is original else method
        if torch.compiler.is_compiling():
            return now(*args, **kwargs)
        if (bound := bind(args, kwargs)) is None:  # The method says better what is wrong.
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

    # A pickle finds a bound method by this name, and some decorators leave another.
    scoped.__name__ = name
    return cast("types.FunctionType", scoped)
