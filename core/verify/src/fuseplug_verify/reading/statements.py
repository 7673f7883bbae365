"""Follows what statements do. Kinds of statements without a method here are not read."""

# ruff: noqa: D102 - an on_ method says in its name what it is for
from __future__ import annotations

import ast
import sys
from dataclasses import replace
from typing import Any

from .calls import CONTEXTS
from .expressions import Expressions
from .findings import MISSING
from .objects import attribute_of, item_of
from .values import NEVER, NOTHING, UNREAD, Value, either, is_tried, known, listed

_LEAVES = (ast.Return, ast.Raise)
_MOST_PASSES = 6
_UNCHANGING = (int, float, complex, str, bytes, tuple, frozenset, range, type(None))


class Walk(Expressions):
    """Goes through the statements of one function."""

    def run(self, tree: Any) -> Value:
        """Go through a whole function, and return what it returns."""
        self._returned: list[Value] = []
        if isinstance(tree, ast.Lambda):
            return self.value(tree.body)
        self.body(tree.body)
        return either(self._returned) if self._returned else known(None)

    def body(self, statements: list[Any]) -> None:
        """Go through *statements*, as far as they are reached."""
        for statement in statements:
            handler = getattr(self, f"on_{type(statement).__name__.lower()}", None)
            if handler is None:
                self.unread(statement, f"the reader does not know {type(statement).__name__}")
            else:
                handler(statement)
            if isinstance(statement, _LEAVES):
                return

    def on_pass(self, node: ast.Pass) -> None:
        pass

    # Both are read as if they were not there: that adds possibilities, and loses none.
    on_continue = on_pass
    on_break = on_pass
    # Where the original raises, a kernel has nothing to equal.
    on_raise = on_pass

    def on_global(self, node: Any) -> None:
        self.note(self.reader.reading.side_effects, node)

    on_nonlocal = on_global

    def on_expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def on_return(self, node: ast.Return) -> None:
        self._returned.append(self.value(node.value) if node.value is not None else known(None))

    def on_if(self, node: ast.If) -> None:
        test = self.condition(node.test, raises=isinstance(node.body[-1], ast.Raise))
        before = dict(self.names)
        if not (isinstance(node.test, ast.Call) and test.object is False):
            self.body(node.body)
        after, self.names = self.names, before
        self.body(node.orelse)
        if isinstance(node.body[-1], _LEAVES):
            return
        leaves = bool(node.orelse) and isinstance(node.orelse[-1], _LEAVES)
        self.names = after if leaves else _joined(self.names, after)

    def on_for(self, node: ast.For) -> None:
        whole = self.value(node.iter)
        self.opaque(node.iter, *(option for option in whole.each if option.fields is not None))
        for _ in range(_MOST_PASSES):
            before = dict(self.names)
            self.bind(node.target, item_of(self, node.iter, whole, None))
            self.body(node.body)
            self.names = _joined(before, self.names)
            if _keys(before) == _keys(self.names):
                break
        else:
            self.unread(node.target, "what a loop assigns does not settle")
        self.body(node.orelse)

    def on_listcomp(self, node: Any) -> Value:
        before, self.names = self.names, dict(self.names)
        for loop in node.generators:
            self.bind(loop.target, item_of(self, node, self.value(loop.iter), None))
            for test in loop.ifs:
                self.condition(test)
        item, self.names = self.value(node.elt), before
        return listed([item], exact=False)

    on_generatorexp = on_listcomp

    def on_with(self, node: ast.With) -> None:
        for item in node.items:
            context = self.value(item.context_expr)
            for option in context.each:
                if option is not NEVER and not (option.cls is not None and issubclass(option.cls, CONTEXTS)):
                    self.unread(item.context_expr, "it computes in a context whose effect is not known")
            if item.optional_vars is not None:
                self.unread(item.optional_vars, "what a context gives is not known")
        self.body(node.body)

    def on_try(self, node: ast.Try) -> None:
        before = dict(self.names)
        self.body([*node.body, *node.orelse])
        ended = self.names
        for handler in node.handlers:
            self.names = _joined(before, ended)
            if handler.name:
                self.names[handler.name] = NOTHING
            self.body(handler.body)
            ended = _joined(ended, self.names)
        self.names = ended
        self.body(node.finalbody)

    def on_delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                self.unread(target, "it is deleted")

    def on_functiondef(self, node: ast.FunctionDef) -> None:
        # The function's body is read here, for any caller, and for any values that its names may have by then.
        before, parameters = self.names, [part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)]
        if node.decorator_list or node.args.defaults or any(node.args.kw_defaults):
            self.unread(node, "a function with decorators or defaults is made")
        self.names = dict.fromkeys([*before, *parameters], UNREAD)
        self.body(node.body)
        self.names = before | {node.name: UNREAD}

    def on_assert(self, node: ast.Assert) -> None:
        self.condition(node.test, raises=True)

    def on_import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self.names[alias.asname or name] = _imported(name)

    def on_importfrom(self, node: ast.ImportFrom) -> None:
        package = str(self.function.__globals__.get("__package__") or "").split(".")
        above = package[: len(package) - node.level + 1] if node.level else []
        module = _imported(".".join([*above, *filter(None, [node.module])]))
        for alias in node.names:
            self.names[alias.asname or alias.name] = attribute_of(self, node, module, alias.name)

    def on_assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.bind(target, value, node)

    def on_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value), node)

    def on_augassign(self, node: ast.AugAssign) -> None:
        added, before = self.value(node.value), self.value(node.target)
        self.opaque(node, added, before)
        changing = [option for option in before.each if not isinstance(option.object, _UNCHANGING)]
        if isinstance(node.target, ast.Name) and any(option.foreign for option in changing):
            self.note(self.reader.reading.side_effects, node)
        if any(option.items is not None or option.named is not None for option in changing):
            self.unread(node, "it changes a container")
        value = Value(tried=is_tried((added, before)))
        if changing:
            value = replace(value, fresh=before.fresh, argument=before.argument)
        self.bind(node.target, value, node)

    def bind(self, target: Any, value: Value, node: Any = None) -> None:
        """Let *target* stand for *value* from here on."""
        node = node or target
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            self.opaque(node, value)
            starred = any(isinstance(element, ast.Starred) for element in target.elts)
            for number, element in enumerate(target.elts):
                exact = not starred and all(o.items is None or o.items.exact for o in value.each)
                self.bind(element, item_of(self, node, value, known(number) if exact else None), node)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, listed((value,), exact=False), node)
        else:
            self._write(target, value, node)

    def _write(self, target: Any, value: Value, node: Any) -> None:
        """Follow an assignment to an attribute or an item."""
        owner = self.value(target.value)
        self.opaque(node, *(option for option in owner.each if isinstance(target, ast.Subscript)))
        if isinstance(target, ast.Subscript):
            self.opaque(node, self.value(target.slice))
        for option in owner.each:
            if option is NEVER:
                continue
            if option.fields is not None and isinstance(target, ast.Attribute):
                option.fields[target.attr] = either((option.fields.get(target.attr, NEVER), value))
            elif option.foreign or isinstance(target, ast.Attribute):
                self.note(self.reader.reading.side_effects, node)
            elif option.items is not None or option.named is not None:
                self.unread(node, "it changes a container")


def _imported(name: str) -> Value:
    module = sys.modules.get(name, MISSING)
    return NEVER if module is MISSING else known(module, fresh=False)


def _joined(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    return one | {name: either((one[name], value)) if name in one else value for name, value in other.items()}


def _keys(names: dict[str, Value]) -> dict[str, object]:
    return {name: value.key for name, value in names.items()}
