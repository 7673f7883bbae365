"""What an expression stands for."""

# ruff: noqa: D102 - an on_ method says in its name what it is for
from __future__ import annotations

import ast
import builtins
import math
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from .arguments import Arguments
from .attributes import attribute_of, item_of, kind_of
from .following import Following
from .found import MISSING, Finding
from .libraries import is_library, is_readable
from .lookup import in_class, is_a
from .settled import settled
from .source import code_of
from .values import NEVER, NOTHING, Value, either, kinds_of, known, listed

_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_IS = (ast.Is, ast.IsNot)
_FOLDED: Mapping[type, tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.FloorDiv: ("floordiv", operator.floordiv),
    ast.Div: ("truediv", operator.truediv),
    ast.Mod: ("mod", operator.mod),
    ast.MatMult: ("matmul", operator.matmul),
    ast.Pow: ("pow", operator.pow),
}


_ASKED = ("__bool__", "__len__", "__float__", "__int__", "__index__", "__str__", "__repr__", "__format__", "__iter__",
          "__abs__", "__neg__", "__pos__", "__invert__", "__round__", "__complex__", "__trunc__")  # fmt: skip


_HOLDERS = (dict, list, tuple, set, frozenset, str, range, type, Tensor)


class Local:
    """A function that is defined in the code that is read."""

    def __init__(self, node: Any, around: Expressions) -> None:
        self.node, self.around, self.code, self.called = node, around, code_of(node, around.code), False


class Expressions:
    """The names that code knows, and what its expressions stand for."""

    def __init__(
        self, reader: Following, function: types.FunctionType, env: dict[str, Value], code: Any = None
    ) -> None:
        self.reader, self.function, self.env = reader, function, env
        self.code: types.CodeType = code or function.__code__
        self.locals: list[Local] = []
        self._testing = False
        self._asked: frozenset[types.CodeType] = frozenset()

    # What is found

    def where(self, node: Any) -> str:
        """Where *node* is, for a person."""
        return f"line {node.lineno} of {self.reader.named(self.function)}"

    def note(self, store: list[Finding], node: Any, kinds: Any = (), why: str = "") -> None:
        """Keep *node* as a finding."""
        source = " ".join(ast.unparse(node).split())
        text = f"{why}{source if len(source) <= 90 else source[:87] + '...'} ({self.where(node)})"
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        self.reader.note(store, text, kinds, self.code, span, source)

    def unread(self, node: Any, why: str) -> None:
        """Keep *node* as what could not be read."""
        self.note(self.reader.found.unknown, node, (), f"{why}: ")

    # Names

    def name(self, name: str) -> Value:
        """What *name* stands for."""
        if name in self.env:
            return self.env[name]
        code, reader = self.function.__code__, self.reader
        if name in code.co_freevars and self.function.__closure__ is not None:
            cell = self.function.__closure__[code.co_freevars.index(name)]
            try:
                held = cell.cell_contents
            except ValueError:
                return NEVER
            if name != "__class__":
                reader.held(cell, name, held)
            return known(held, *kind_of(held), owned=False)
        space = self.function.__globals__
        if name in space:
            reader.looked(space, name, space[name])
            return known(space[name], *kind_of(space[name]), owned=False)
        if hasattr(builtins, name):
            return known(getattr(builtins, name), owned=False)
        reader.looked(space, name, MISSING)
        return NEVER

    # Expressions

    def value(self, node: Any) -> Value:
        """What *node* stands for."""
        testing, self._testing = self._testing, False
        handler = getattr(self, f"on_{type(node).__name__.lower()}", None)
        if isinstance(node, ast.Compare):
            return self.compare(node, testing)
        if handler is not None:
            found: Value = handler(node)
            return found
        parts = [self.value(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        return Value(kinds_of(parts))

    def condition(self, test: Any, *, raises: bool = False) -> bool | None:
        """Note what *test* depends on; of several joined by ``and`` or ``or``, each by itself.

        Return whether it is true, if it is `settled`. What would then not be evaluated is not read.
        """
        if isinstance(test, ast.BoolOp):
            decides, truths = isinstance(test.op, ast.Or), list[bool | None]()
            for each in test.values:
                truths.append(self.condition(each, raises=raises))
                if truths[-1] is decides:
                    return decides
            return None if None in truths else not decides
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self.condition(test.operand, raises=raises)
            return None if truth is None else not truth
        self._testing = True
        found = self.value(test)
        self.asked(test, found)
        plain = is_a(found.object, types.FunctionType | type | types.ModuleType) and not found.kinds
        if found.kinds and not plain and not raises:
            self.note(self.reader.found.conditions, test, found.kinds)
        return settled(self, test)

    def asking(self, function: types.FunctionType, env: dict[str, Value]) -> Expressions | None:
        """A walk through *function*, for what it returns; ``None`` within that walk itself."""
        if function.__code__ in self._asked:
            return None
        walk = type(self)(self.reader, function, env)
        walk._asked = self._asked | {function.__code__}
        return walk

    def on_constant(self, node: ast.Constant) -> Value:
        return known(node.value)

    def on_name(self, node: ast.Name) -> Value:
        return self.name(node.id)

    def on_attribute(self, node: ast.Attribute) -> Value:
        return attribute_of(self.reader, self.value(node.value), self._mangled(node.attr), self.where(node))

    def _mangled(self, name: str) -> str:
        if name.startswith("__") and not name.endswith("__"):
            cls = self.function.__qualname__.rpartition("<locals>.")[2].split(".")[:-1]
            return f"_{cls[-1].lstrip('_')}{name}" if cls else name
        return name

    def on_subscript(self, node: ast.Subscript) -> Value:
        whole = self.value(node.value)
        index = self.value(node.slice)
        self.asked(node, index)
        if isinstance(node.slice, ast.Slice) and whole.items is not None:
            return listed(whole.items, exact=False)
        return item_of(self.reader, whole, index)

    def on_starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    def on_namedexpr(self, node: ast.NamedExpr) -> Value:
        found = self.value(node.value)
        self.bind(node.target, found)
        return found

    def on_ifexp(self, node: ast.IfExp) -> Value:
        if (truth := self.condition(node.test)) is not None:
            return self.value(node.body if truth else node.orelse)
        return either((self.value(node.body), self.value(node.orelse)))

    def on_boolop(self, node: ast.BoolOp) -> Value:
        values = []
        for each in node.values[:-1]:
            found = self.value(each)
            if found.kinds:
                self.note(self.reader.found.conditions, each, found.kinds)
            values.append(found)
            if settled(self, each) is isinstance(node.op, ast.Or):
                return either(values)
        return either((*values, self.value(node.values[-1])))

    def on_unaryop(self, node: ast.UnaryOp) -> Value:
        found = self.value(node.operand)
        self.asked(node, found)
        if isinstance(node.op, ast.USub) and type(found.object) in (int, float):
            return known(-found.object, *found.kinds)
        return Value(found.kinds)

    def on_binop(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        kinds = left.kinds | right.kinds
        if type(node.op) in _FOLDED:
            name, fold = _FOLDED[type(node.op)]
            for one, other, method in ((left, right, f"__{name}__"), (right, left, f"__r{name}__")):
                self.operator(one, method, other)
            if type(left.object) in (int, float) and type(right.object) in (int, float) and name != "pow":
                try:
                    return known(fold(left.object, right.object), *kinds)
                except (ArithmeticError, TypeError):
                    return Value(kinds)
            if isinstance(node.op, ast.Add) and left.items is not None and right.items is not None:
                return listed((*left.items, *right.items), exact=left.exact and right.exact)
        if isinstance(node.op, ast.Mod | ast.FloorDiv | ast.Div) and "shape" in kinds:
            self.sizes(right)
        return Value(kinds - {"shape"} if kinds & {"value", "param"} else kinds)

    def operator(self, one: Value, method: str, *others: Value) -> None:
        """Follow an operator that a class of a model defines."""
        for each in one.each:
            cls = each.made or (type(each.object) if each.known else None)
            if cls is None or is_library(cls):
                continue
            if is_readable(function := in_class(cls, method)):
                self.reader.function(function, Arguments((each, *others)))

    def asked(self, node: Any, *values: Value) -> None:
        """Note objects whose class, one of a model, has methods that Python itself calls here, such as ``__bool__``."""
        for each in (option for value in values for option in value.each):
            cls = each.made or (type(each.object) if each.known else None)
            if cls is None or isinstance(each.object, type) or is_library(cls):
                continue
            if any(is_readable(in_class(cls, name)) for name in _ASKED):
                self.unread(node, f"methods of {cls.__name__} decide what Python sees of it")

    def compare(self, node: ast.Compare, testing: bool) -> Value:
        """What a comparison stands for; *testing* says that it is a condition, not part of a computation."""
        values = [self.value(each) for each in (node.left, *node.comparators)]
        kinds = kinds_of(values)
        # ``"mask" in kwargs`` asks which arguments there are, not what they hold.
        named = isinstance(values[0].object, str) and not values[-1].known
        named = named and all(isinstance(op, ast.In | ast.NotIn) for op in node.ops)
        if named or all(isinstance(op, _IS) for op in node.ops):
            return Value(frozenset({"presence" if kind in ("value", "param", "option") else kind for kind in kinds}))
        for op, one, other in zip(node.ops, values, values[1:], strict=False):
            if isinstance(op, ast.In | ast.NotIn):
                self.operator(other, "__contains__", one)
                for each in other.each:
                    if each.known and not isinstance(each.object, _HOLDERS):
                        item_of(self.reader, each, one)
            else:
                self.operator(one, "__eq__" if isinstance(op, ast.Eq | ast.NotEq) else "__lt__", other)
        if (contained := _contained(node.ops, values)) is not None:
            return known(contained, *kinds)
        if "shape" in kinds:
            for each in values:
                self.sizes(each)
        compared = kinds & {"value", "param"} and any(isinstance(op, _ORDER) for op in node.ops)
        if compared and not testing and not any(type(v.object) in (int, float) and v.object == 0 for v in values):
            self.note(self.reader.found.clamps, node)
        return Value(kinds)

    def sizes(self, value: Value) -> None:
        """Keep the integers in *value*: a shape is compared with them."""
        for each in value.each:
            for number in each.object if type(each.object) in (tuple, list, set, frozenset, range) else (each.object,):
                if type(number) is int:
                    self.reader.found.sizes.add(number)
                elif type(number) is float and number.is_integer() and math.isfinite(number):
                    self.reader.found.sizes.add(int(number))
            for item in each.items or ():
                self.sizes(item)

    def on_tuple(self, node: Any) -> Value:
        items: list[Value] = []
        exact = True
        for each in node.elts:
            found = self.value(each)
            if not isinstance(each, ast.Starred):
                items.append(found)
            elif found.items is not None and found.exact:
                items += found.items
            else:
                items.append(item_of(self.reader, found, None))
                exact = False
        return listed(items, exact=exact)

    on_list = on_tuple
    on_set = on_tuple

    def on_dict(self, node: ast.Dict) -> Value:
        named: dict[str, Value] | None = {}
        items = []
        for key, each in zip(node.keys, node.values, strict=True):
            at, found = self.value(key) if key is not None else NOTHING, self.value(each)
            if key is None:
                found = item_of(self.reader, found, Value())
            items.append(found)
            named = {**named, at.object: found} if named is not None and is_a(at.object, str) else None
        return Value(kinds_of(items), items=(either(items),) if items else (), exact=False, named=named)

    def on_lambda(self, node: ast.Lambda) -> Value:
        return self.define(node)

    def define(self, node: Any) -> Value:
        """A function that is defined here."""
        local = Local(node, self)
        self.locals.append(local)
        return Value(local=local)

    def on_listcomp(self, node: Any) -> Value:
        before, code = self.env, self.code
        self.env, self.code = dict(self.env), code_of(node, self.code)
        try:
            for each in node.generators:
                self.bind(each.target, item_of(self.reader, self.value(each.iter), None))
                for test in each.ifs:
                    self.condition(test)
            parts = (node.value,) if isinstance(node, ast.DictComp) else (node.elt,)
            if isinstance(node, ast.DictComp):
                self.value(node.key)
            return listed([self.value(part) for part in parts], exact=False)
        finally:
            self.env, self.code = before, code

    on_setcomp = on_listcomp
    on_generatorexp = on_listcomp

    def on_dictcomp(self, node: ast.DictComp) -> Value:
        """One that filters a dict by its keys, as decorators do with keyword arguments, keeps its names."""
        found: Value = self.on_listcomp(node)
        match node:
            case ast.DictComp(
                key=ast.Name(id=key),
                value=ast.Name(id=value),
                generators=[
                    ast.comprehension(
                        target=ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)]),
                        iter=ast.Call(func=ast.Attribute(value=source, attr="items"), args=[]),
                        ifs=tests,
                    )
                ],
            ) if (first, second) == (key, value):
                return self._filtered(self.value(source), key, value, tests) or found
        return found

    def _filtered(self, whole: Value, key: str, value: str, tests: list[Any]) -> Value | None:
        """*whole* without the names that one of *tests* leaves out; ``None`` where that is not known."""
        kept, before = dict[str, Value](), self.env
        for name, item in (whole.named or {}).items():
            self.env = {**before, key: known(name), value: item}
            truths = [self.value(test).object for test in tests]
            self.env = before
            if not all(truth is True or truth is False for truth in truths):
                return None
            kept |= {name: item} if all(truths) else {}
        if whole.named is None:
            return None
        items = (*kept.values(), *filter(None, [whole.others]))
        return replace(listed(items, exact=False), named=kept, others=whole.others)

    def on_await(self, node: ast.Await) -> Value:
        return self.value(node.value)

    def on_joinedstr(self, node: ast.JoinedStr) -> Value:
        parts = [self.value(each) for each in node.values]
        self.asked(node, *parts)
        if all(is_a(v.object, str | int) for v in parts) and all(
            isinstance(each, ast.Constant) or (each.conversion == -1 and each.format_spec is None)  # type: ignore[attr-defined]
            for each in node.values
        ):
            return known("".join(str(v.object) for v in parts), *kinds_of(parts))
        return Value(kinds_of(parts))

    def on_formattedvalue(self, node: ast.FormattedValue) -> Value:
        return self.value(node.value)

    def on_call(self, node: ast.Call) -> Value:
        raise NotImplementedError

    def bind(self, target: Any, value: Value) -> None:
        raise NotImplementedError


def _contained(ops: list[ast.cmpop], values: list[Value]) -> bool | None:
    """What ``in`` or ``not in`` says of a known string and known strings; ``None`` if it is anything else."""
    one, other = values[0].object, values[-1].object
    if len(ops) != 1 or not isinstance(ops[0], ast.In | ast.NotIn):
        return None
    plain = type(one) is str and type(other) in (tuple, frozenset) and all(type(each) is str for each in other)
    return (one in other) is isinstance(ops[0], ast.In) if plain else None
