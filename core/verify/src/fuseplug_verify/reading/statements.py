"""What a statement does."""

# ruff: noqa: D102 - an on_ method says in its name what it is for
from __future__ import annotations

import ast
import contextlib
import functools
import sys
from dataclasses import replace
from typing import Any

from .arguments import Arguments, place
from .attributes import attribute_of, item_of
from .calls import Calls
from .decorators import kind_of_context
from .expressions import Local
from .found import MISSING
from .libraries import is_library, is_readable
from .lookup import in_class
from .values import NEVER, NOTHING, Value, either, kinds_of, known, listed

_LEAVES = (ast.Return, ast.Raise)


class Walk(Calls):
    """Goes through the statements of one function."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._returned: list[Value] = []
        self._yielded: list[Value] = []
        self._globals: set[str] = set()
        self._nonlocals: set[str] = set()
        self.around: Walk | None = None

    def run(self, node: Any) -> Value:
        """Go through a whole function, and return what it returns."""
        if isinstance(node, ast.Lambda):
            self._returned.append(self.value(node.body))
        else:
            self.body(node.body)
        for local in self.locals:
            if not local.called:
                self.call_local(local, Arguments(rest=_ARGUMENT, others=_ARGUMENT))
        if self._yielded:
            return listed(self._yielded, exact=False)
        return either(self._returned) if self._returned else known(None)

    def call_local(self, local: Local, given: Arguments) -> Value:
        """Follow a call of a function that is defined in the code."""
        if local.called and any(walking is local for walking in self.reader.walking):
            return Value(kinds_of(given.all))
        local.called = True
        node, around = local.node, local.around
        walk = Walk(self.reader, self.function, dict(around.env), local.code)
        walk.around = around  # type: ignore[assignment]
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        defaults = [around.value(each) for each in node.args.defaults]
        standing = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        taken = [(name, "positional") for name in names]
        taken += [(each.arg, "keyword") for each in node.args.kwonlyargs]
        taken += [(node.args.vararg.arg, "*")] if node.args.vararg else []
        taken += [(node.args.kwarg.arg, "**")] if node.args.kwarg else []
        for each, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            standing |= {each.arg: around.value(default)} if default is not None else {}
        walk.env |= place(taken, standing, given)
        self.reader.walking.append(local)
        try:
            return walk.run(node)
        finally:
            self.reader.walking.pop()

    # Statements

    def body(self, statements: list[Any]) -> bool:
        """Go through *statements*, and say whether what follows them is never reached."""
        for each in statements:
            handler = getattr(self, f"on_{type(each).__name__.lower()}", None)
            if (handler is not None and handler(each) is True) or isinstance(each, _LEAVES):
                return True
        return False

    def on_expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def on_return(self, node: ast.Return) -> None:
        self._returned.append(self.value(node.value) if node.value is not None else known(None))

    def on_yield(self, node: ast.Yield) -> Value:
        self._yielded.append(self.value(node.value) if node.value is not None else NOTHING)
        return _ARGUMENT

    def on_yieldfrom(self, node: ast.YieldFrom) -> Value:
        self._yielded.append(item_of(self.reader, self.value(node.value), None))
        return NOTHING

    def on_if(self, node: ast.If) -> bool:
        if (truth := self.condition(node.test, raises=_only_raises(node.body))) is not None:
            return self.body(node.body if truth else node.orelse)
        before = dict(self.env)
        self.body(node.body)
        after = self.env
        self.env = before
        self.body(node.orelse)
        if not isinstance(node.body[-1], _LEAVES):
            self.env = after if node.orelse and isinstance(node.orelse[-1], _LEAVES) else _joined(self.env, after)
        return False

    def on_while(self, node: ast.While) -> None:
        for _ in range(2):
            self.condition(node.test)
            self._maybe(node.body)
        self.body(node.orelse)

    def on_for(self, node: Any) -> None:
        each = item_of(self.reader, self.value(node.iter), None)
        for _ in range(2):  # the second pass sees what the first assigned
            self.bind(node.target, each)
            self._maybe(node.body)
        self.body(node.orelse)

    on_asyncfor = on_for

    def _maybe(self, statements: list[Any]) -> None:
        before = dict(self.env)
        self.body(statements)
        self.env = _joined(before, self.env)

    def on_try(self, node: Any) -> None:
        before = dict(self.env)
        self.body(node.body)
        self.body(node.orelse)
        ends = [self.env]
        for handler in node.handlers:
            self.env = _joined(before, dict(ends[0]))
            if handler.type is not None:
                self.value(handler.type)
            if handler.name:
                self.env[handler.name] = NOTHING
            self.body(handler.body)
            if not isinstance(handler.body[-1], _LEAVES):
                ends.append(self.env)
        for each in ends[1:]:
            ends[0] = _joined(ends[0], each)
        self.env = ends[0]
        self.body(node.finalbody)

    on_trystar = on_try

    def on_with(self, node: Any) -> None:
        for item in node.items:
            found = self.value(item.context_expr)
            kinds = {kind for each in found.each if (kind := _context(each))}
            if kinds:
                self.note(self.reader.found.contexts, item.context_expr, kinds)
            entered = [self._entered(each) for each in found.each]
            if item.optional_vars is not None:
                self.bind(item.optional_vars, either(entered))
        self.body(node.body)

    on_asyncwith = on_with

    def _entered(self, context: Value) -> Value:
        cls = context.made or (type(context.object) if context.known else None)
        if cls is None or is_library(cls):
            return Value(context.kinds, owned=context.owned)
        found = NOTHING
        for name in ("__exit__", "__enter__"):
            if is_readable(function := in_class(cls, name)):
                found = self.reader.function(
                    function, Arguments((context,), rest=NOTHING if name == "__exit__" else None)
                )
        return found

    def on_assert(self, node: ast.Assert) -> None:
        self.condition(node.test, raises=True)

    def on_match(self, node: Any) -> None:
        subject = self.value(node.subject)
        if subject.kinds:
            self.note(self.reader.found.conditions, node.subject, subject.kinds)
        before, ends = dict(self.env), [dict(self.env)]
        for case in node.cases:
            self.env = dict(before)
            self._pattern(case.pattern, subject)
            if case.guard is not None:
                self.condition(case.guard)
            self.body(case.body)
            if not isinstance(case.body[-1], _LEAVES):
                ends.append(self.env)
        self.env = functools.reduce(_joined, ends)

    def _pattern(self, pattern: Any, subject: Value) -> None:
        """Bind the names in *pattern* to what *subject* has for them."""
        for each in ast.walk(pattern):
            if isinstance(each, ast.MatchValue):
                found = self.value(each.value)
                if "shape" in subject.kinds:
                    self.sizes(found)
            elif isinstance(each, ast.MatchAs | ast.MatchStar) and each.name:
                whole = each is pattern or isinstance(pattern, ast.MatchAs)
                self.env[each.name] = subject if whole else item_of(self.reader, subject, None)
            elif isinstance(each, ast.MatchMapping) and each.rest:
                self.env[each.rest] = item_of(self.reader, subject, NOTHING)

    def on_functiondef(self, node: Any) -> None:
        for each in node.decorator_list:
            self.value(each)
        self.bind(ast.Name(id=node.name), self.define(node))

    on_asyncfunctiondef = on_functiondef

    def on_classdef(self, node: ast.ClassDef) -> None:
        self.unread(
            node.bases[0] if node.bases else ast.copy_location(ast.Name(id=node.name), node), "a class is defined"
        )
        self.env[node.name] = NOTHING

    def on_import(self, node: ast.Import) -> None:
        for each in node.names:
            name = each.name if each.asname else each.name.partition(".")[0]
            self.env[each.asname or name] = known(sys.modules.get(name, MISSING), owned=False)

    def on_importfrom(self, node: ast.ImportFrom) -> None:
        space = self.function.__globals__
        package = str(space.get("__package__") or "").split(".")
        above = package[: len(package) - node.level + 1] if node.level else []
        module = sys.modules.get(".".join([*above, *([node.module] if node.module else [])]))
        for each in node.names:
            found = (
                NEVER
                if module is None
                else attribute_of(self.reader, known(module, owned=False), each.name, self.where(node))
            )
            self.env[each.asname or each.name] = found

    def on_global(self, node: ast.Global) -> None:
        self._globals.update(node.names)

    def on_nonlocal(self, node: ast.Nonlocal) -> None:
        self._nonlocals.update(node.names)

    def on_assign(self, node: ast.Assign) -> None:
        found = self.value(node.value)
        for target in node.targets:
            self.bind(target, found, node)

    def on_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value), node)

    def on_augassign(self, node: ast.AugAssign) -> None:
        target: Any = node.target
        added, before = self.value(node.value), self.value(target)
        kinds = (added.kinds | before.kinds) - ({"shape"} if before.kinds & {"value", "param"} else set())
        if not isinstance(target, ast.Name):
            self.bind(target, Value(kinds), node)
            return
        if before.foreign and not before.unchangeable:
            self.note(self.reader.found.side_effects, node)
        if before.items is not None and added.items is not None:
            after = replace(before, items=(either((*before.items, *added.items)),), exact=False, named=None, _key=[])
        elif before.unchangeable or before.owned:
            after = Value(kinds)
        else:
            after = Value(kinds, owned=before.owned, given=before.given)
        self.bind(target, after, node)

    def on_delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                if target.id in self._globals:
                    self.note(self.reader.found.side_effects, node)
            else:
                self._write(target, node)

    def bind(self, target: Any, value: Value, node: Any = None) -> None:
        """Let *target* stand for *value* from here on."""
        if isinstance(target, ast.Name):
            self._name(target.id, value, node or target)
        elif isinstance(target, ast.Tuple | ast.List):
            starred = any(isinstance(each, ast.Starred) for each in target.elts)
            for number, each in enumerate(target.elts):
                at = None if starred else known(number)
                self.bind(each, _unpacked(self, value, at), node)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, listed((value,), exact=False), node)
        else:
            self._write(target, node or target, value)

    def _name(self, name: str, value: Value, node: Any) -> None:
        if name in self._globals:
            self.note(self.reader.found.side_effects, node)
        elif name in self._nonlocals:
            around = self.around
            while around is not None and name in around._nonlocals:
                around = around.around
            if around is None or name not in around.env:
                self.note(self.reader.found.side_effects, node)
            else:
                around.env[name] = either((around.env[name], value))
        self.env[name] = value

    def _write(self, target: Any, node: Any, value: Value = NOTHING) -> None:
        owner = self.value(target.value)
        if isinstance(target, ast.Subscript):
            self.value(target.slice)
            self.operator(owner, "__setitem__", NOTHING, value)
            if owner.foreign:
                self.note(self.reader.found.side_effects, node)
            elif owner.items is not None:
                self.grown(target.value, owner, value)
            return
        for each in owner.each:
            if each.fields is not None and isinstance(target, ast.Attribute):
                before = each.fields.get(target.attr, NEVER)
                each.fields[target.attr] = either((before, value))
        if any(not each.owned for each in owner.each):
            self.note(self.reader.found.side_effects, node)


_ARGUMENT = Value(frozenset({"value"}), owned=False, given=True)


def _unpacked(walk: Walk, value: Value, at: Value | None) -> Value:
    exact = at is not None and all(each.items is None or each.exact for each in value.each)
    return item_of(walk.reader, value, at if exact else None)


def _only_raises(statements: list[Any]) -> bool:
    return isinstance(statements[-1], ast.Raise) and all(
        isinstance(s, ast.Raise | ast.Expr | ast.Assign) for s in statements
    )


def _joined(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    found = dict(one)
    for name, value in other.items():
        found[name] = either((found[name], value)) if name in found else value
    return found


def _context(value: Value) -> str | None:
    cls = value.made or (type(value.object) if value.known else None)
    if value is NEVER or cls is contextlib.nullcontext:
        return None
    return "other" if cls is None else kind_of_context(cls)
