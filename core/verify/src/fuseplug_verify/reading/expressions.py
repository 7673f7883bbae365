"""Finds what an expression stands for. Kinds of expressions without a method here are not read."""

# ruff: noqa: D102 - an on_ method says in its name what it is for
from __future__ import annotations

import ast
import builtins
import re
from typing import Any

from .arguments import Arguments
from .calls import call
from .findings import MISSING
from .libraries import is_readable
from .lookup import in_class, is_a
from .objects import attribute_of, item_of
from .values import NEVER, NOTHING, Value, either, is_tried, known, listed
from .walking import Walking

_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_IS = (ast.Is, ast.IsNot)
_IN = (ast.In, ast.NotIn)
_LEAVES_OUT = re.compile(r"\{(\w+): (\w+) for \1, \2 in (\w+)\.items\(\) if \1 in (\w+)\}")


class Expressions(Walking):
    """The names that a function knows, and what its expressions stand for."""

    # Names

    def name(self, name: str) -> Value:
        """What *name* stands for."""
        if name in self.names:
            return self.names[name]
        code = self.function.__code__
        if name in code.co_freevars and self.function.__closure__ is not None:
            cell = self.function.__closure__[code.co_freevars.index(name)]
            try:
                value = cell.cell_contents
            except ValueError:
                return NEVER
            if name != "__class__":
                self.reader.looked(cell, name, value)
            return self.owner_of(value)
        space = self.function.__globals__
        if name not in space and hasattr(builtins, name):
            return known(getattr(builtins, name), fresh=False)
        value = space.get(name, MISSING)
        self.reader.looked(space, name, value)
        return NEVER if value is MISSING else known(value, fresh=False)

    # Expressions

    def value(self, node: Any) -> Value:
        """What *node* stands for."""
        handler = getattr(self, f"on_{type(node).__name__.lower()}", None)
        if handler is None:
            return self.unread(node, f"the reader does not know {type(node).__name__}")
        value: Value = handler(node)
        return value

    def condition(self, test: Any, *, raises: bool = False) -> Value:
        """What *test* stands for. It, or a part of its ``and`` or ``or``, is a branch if only examples can vary it."""
        if isinstance(test, ast.BoolOp):
            return Value(tried=is_tried([self.condition(part, raises=raises) for part in test.values]))
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return Value(tried=self.condition(test.operand, raises=raises).tried)
        value = self.value(test)
        self.opaque(test, value)
        if is_tried((value,)) and not raises:
            self.note(self.reader.reading.branches, test)
        return value

    def on_constant(self, node: ast.Constant) -> Value:
        return known(node.value)

    def on_name(self, node: ast.Name) -> Value:
        return self.name(node.id)

    def on_attribute(self, node: ast.Attribute) -> Value:
        name = node.attr
        if name.startswith("__") and not name.endswith("__"):
            classes = self.function.__qualname__.split(".")
            name = f"_{classes[-2].lstrip('_')}{name}" if len(classes) > 1 else name
        return attribute_of(self, node, self.value(node.value), name)

    def on_subscript(self, node: ast.Subscript) -> Value:
        value, index = self.value(node.value), self.value(node.slice)
        self.opaque(node, index)
        return item_of(self, node, value, index)

    def on_slice(self, node: ast.Slice) -> Value:
        self.sizes(parts := [self.value(part) for part in (node.lower, node.upper, node.step) if part])
        return Value(tried=is_tried(parts))

    def on_tuple(self, node: Any) -> Value:
        return listed([self.value(element) for element in node.elts])

    on_list = on_tuple
    on_set = on_tuple

    def on_dict(self, node: ast.Dict) -> Value:
        keys: list[Any] = [self.value(key).object if key is not None else MISSING for key in node.keys]
        values = [self.value(value) for value in node.values]
        if all(is_a(key, str) for key in keys):
            return Value(named=dict(zip(keys, values, strict=True)))
        return self.unread(node, "not all keys of a dict are known")

    def on_dictcomp(self, node: ast.DictComp) -> Value:
        """Read a dict that only leaves out keyword arguments, as decorators do: any of them may be left out anyway."""
        parts = _LEAVES_OUT.fullmatch(ast.unparse(node))
        whole = self.name(parts[3]) if parts else NOTHING
        if parts and whole.named is not None:
            self.opaque(node, self.name(parts[4]))
            return whole
        return self.unread(node, "it makes a dict")

    def on_joinedstr(self, node: ast.JoinedStr) -> Value:
        values = [self.value(part) for part in node.values]
        self.opaque(node, *values)
        return Value(tried=is_tried(values))

    def on_formattedvalue(self, node: ast.FormattedValue) -> Value:
        return self.value(node.value)

    def on_ifexp(self, node: ast.IfExp) -> Value:
        self.condition(node.test)
        return either((self.value(node.body), self.value(node.orelse)))

    def on_boolop(self, node: ast.BoolOp) -> Value:
        *first, last = node.values
        return either([*(self.condition(part) for part in first), self.value(last)])

    def on_unaryop(self, node: ast.UnaryOp) -> Value:
        value = self.value(node.operand)
        self.opaque(node, value)
        if isinstance(node.op, ast.USub) and type(value.object) in (int, float):
            return known(-value.object)
        return Value(tried=is_tried((value,)))

    def on_binop(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        self.opaque(node, left, right)
        if isinstance(node.op, ast.Mod | ast.FloorDiv | ast.Div) and is_tried((left,)):
            self.sizes((right,))
        containers = [item for side in (left, right) for item in side.items or ()]
        if containers:  # ``[x] * 2``, ``[x] + [y]``
            return listed(containers, exact=False)
        return Value(tried=is_tried((left, right)))

    def on_compare(self, node: ast.Compare) -> Value:
        values = [self.value(part) for part in (node.left, *node.comparators)]
        last = values[-1]
        if all(isinstance(op, _IS) for op in node.ops):
            return NOTHING
        if all(isinstance(op, _IN) for op in node.ops) and is_a(values[0].object, str) and last.named is not None:
            return NOTHING  # the guard compares which arguments there are
        for option in last.each:
            if (
                isinstance(node.ops[-1], _IN)
                and option.known
                and is_readable(in_class(type(option.object), "__getitem__"))
            ):
                item_of(self, node, option, values[0])
            else:
                self.opaque(node, option)
        self.opaque(node, *values[:-1])
        if is_tried(values):
            self.sizes(values)
            self.reader.reading.clamps |= any(isinstance(op, _ORDER) for op in node.ops)
        return Value(tried=is_tried(values))

    def on_call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and "super" not in self.names:
            return self._super(node)
        return call(self, node, self.value(node.func), self._arguments(node))

    def _arguments(self, node: ast.Call) -> Arguments:
        values: list[Value] = []
        rest: list[Value] = []
        for argument in node.args:
            whole = self.value(argument.value if isinstance(argument, ast.Starred) else argument)
            if not isinstance(argument, ast.Starred) and not rest:
                values.append(whole)
            elif isinstance(argument, ast.Starred) and whole.items is not None and whole.items.exact and not rest:
                values += whole.items
            else:
                rest.append(item_of(self, node, whole, None) if isinstance(argument, ast.Starred) else whole)
        named: dict[str, Value] = {}
        others: dict[str | None, Value] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
                continue
            for option in value.each:
                if option.named is None and option is not NEVER:
                    self.unread(node, "the arguments that ** passes on are not known")
                for name, item in (option.named or {}).items():
                    others[name] = either((others[name], item)) if name in others else item
        return Arguments(tuple(values), either(rest) if rest else None, named, others)

    def _super(self, node: ast.Call) -> Value:
        """What ``super()`` without arguments stands for."""
        code = self.function.__code__
        itself = self.names.get(code.co_varnames[0], NOTHING) if code.co_argcount else NOTHING
        cls = self.name("__class__").object if "__class__" in code.co_freevars else MISSING
        if node.args or not isinstance(cls, type) or not (itself.known or itself.fields is not None):
            return self.unread(node, "which class super() looks in is not known")
        return Value(cls=cls, receiver=itself, fresh=itself.fresh)
