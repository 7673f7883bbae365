"""Finds what a test comes to where constants of Python modules alone decide it: the guard watches these."""

from __future__ import annotations

import ast
import functools
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from .arguments import parameters
from .following import Following
from .found import MISSING
from .libraries import is_library, is_readable
from .lookup import is_a
from .source import tree_of
from .values import NOTHING, Value

IS_SCRIPTING, IS_TRACING = torch.jit.is_scripting, torch.jit.is_tracing  # type: ignore[attr-defined]
"""What is scripted is no longer Python. Where code asks whether it is traced, calls that are traced are the original's.
"""

SCALARS = (bool, int, float, str, type(None))
"""Types of constants."""

_COMPARED: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Testing(Protocol):
    """A walk through a function, as this asks for it: `fuseplug_verify.reading.statements.Walk`."""

    reader: Following
    function: types.FunctionType
    code: types.CodeType
    env: dict[str, Value]

    def value(self, node: Any) -> Value:
        """What *node* stands for."""

    def condition(self, test: Any) -> bool | None:
        """Note what *test* depends on."""

    def asking(self, function: types.FunctionType, env: dict[str, Value]) -> Testing | None:
        """A walk through *function*, for what it returns; ``None`` within that walk itself."""


class Answer(Mapping[str, Any]):
    """What a memoised function answers, as a namespace with one name: so that it is watched like any other."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.name = f"{getattr(function, '__name__', 'it')}()"

    def __getitem__(self, name: str) -> Any:
        if name != self.name:
            raise KeyError(name)
        return self.function()

    def __iter__(self) -> Iterator[str]:
        return iter((self.name,))

    def __len__(self) -> int:
        return 1


answer_of = functools.lru_cache(maxsize=256)(Answer)
"""The same for the same function, so that equal guards stay equal."""


def settled(walk: Testing, test: Any) -> bool | None:
    """Say whether *test*, of one operand, is true; ``None`` where anything but watched constants decides.

    No local name counts: what a loop assigns is seen twice only. A function counts if it is called without arguments
    and either is one ``return`` of what counts, or is memoised and was called before.
    """
    if isinstance(test, ast.Call):
        return None if test.args or test.keywords else _answered(walk, walk.value(test.func).object)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        one, other = (_constant(walk, each) for each in (test.left, test.comparators[0]))
        compare = _COMPARED.get(type(test.ops[0]))
        if compare is None or one is MISSING or other is MISSING:
            return None
        identical = isinstance(test.ops[0], ast.Is | ast.IsNot) and (one is None or other is None)
        plain = identical or _scalars(one, other)
        return bool(compare(one, other)) if plain else None
    found = _constant(walk, test)
    return bool(found) if _scalars(found) else None


def _constant(walk: Testing, node: Any) -> Any:
    """The constant that *node* names, or `MISSING`: torch's own are settings, which are not watched."""
    if isinstance(node, ast.Constant):
        return node.value
    owner = node
    while isinstance(owner, ast.Attribute):
        owner = owner.value
        if not is_a(module := walk.value(owner).object, types.ModuleType) or is_library(module):
            return MISSING
    if not isinstance(owner, ast.Name) or _is_local(walk, owner.id) or is_library(walk.function):
        return MISSING
    return walk.value(node).object


def _is_local(walk: Testing, name: str) -> bool:
    code, outer = walk.code, walk.function.__code__
    held = name in code.co_freevars and name not in outer.co_freevars
    return held or name in walk.env or name in (*code.co_varnames, *code.co_cellvars)


def _scalars(*things: Any) -> bool:
    return all(type(each) in SCALARS for each in things)


def _answered(walk: Testing, function: Any) -> bool | None:
    if any(function is each for each in (IS_SCRIPTING, IS_TRACING)):
        return False
    if is_a(function, functools._lru_cache_wrapper):
        answer = function() if is_filled(function) else MISSING
        return bool(answer) if _scalars(answer) else None
    tree = tree_of(function) if is_readable(function) else None
    asking = None if tree is None else walk.asking(function, dict.fromkeys(dict(parameters(function)), NOTHING))
    if asking is None or not isinstance(tree, ast.FunctionDef):
        return None
    *before, last = tree.body
    alone = all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in before)
    return asking.condition(last.value) if alone and isinstance(last, ast.Return) and last.value is not None else None


def is_filled(memoised: Any) -> bool:
    """Say whether *memoised*, of ``functools.lru_cache``, answers a call without arguments without running anything."""
    function = memoised.__wrapped__
    return bool(memoised.cache_info().currsize) and is_a(function, types.FunctionType) and not any(parameters(function))
