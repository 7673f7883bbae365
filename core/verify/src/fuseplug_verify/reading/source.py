"""Finds the syntax tree of a function: one that compiles to exactly the same code, or none."""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
# How a method is called depends on whether the module imports the name in front of the dot. The length of jumps changes
# with it.
_CALLING = {0} | {
    number
    for name, number in dis.opmap.items()
    if name in ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")
    or name.startswith("CALL")
}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
# Equal code comes from equal source. A tree does not refer to its code, so the code can be let go.
_trees: weakref.WeakKeyDictionary[types.CodeType, Function] = weakref.WeakKeyDictionary()


def tree_of(function: types.FunctionType) -> Function | None:
    """Return the tree of *function*, with the lines and columns of its file.

    The file may have changed since it was imported, and a line may contain several lambdas. So a tree is accepted only
    if it compiles to the code of the function. ``None`` if there is no such tree.
    """
    code = function.__code__
    if (known := _trees.get(code)) is not None:
        return known
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not 0 < code.co_firstlineno <= len(lines):
        return None
    blocks = _in_block if code.co_name != "<lambda>" else _in_file
    found = [node for node in blocks(lines, code.co_firstlineno) if _compiles_to(node, code)]
    if not found:
        return None
    _trees[code] = found[0]
    return found[0]


def _in_block(lines: list[str], first: int) -> Iterator[Function]:
    """The function whose block begins at line *first*: parsing one function is cheap, parsing a file is not."""
    indented = lines[first - 1][:1].isspace()
    try:
        block = "".join(inspect.getblock(lines[first - 1 :]))
        tree = ast.parse(f"if True:\n{block}" if indented else block)
    except (SyntaxError, ValueError, RecursionError):
        return
    body = tree.body[0].body if indented and isinstance(tree.body[0], ast.If) else tree.body
    ast.increment_lineno(tree, first - 1 - indented)
    if body and isinstance(body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        yield body[0]


def _in_file(lines: list[str], first: int) -> Iterator[Function]:
    """The lambdas that begin at line *first*: the statement around one may begin anywhere."""
    yield from _lambdas("".join(lines)).get(first, ())


@functools.lru_cache(maxsize=2)
def _lambdas(text: str) -> dict[int, list[Function]]:
    found: dict[int, list[Function]] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


def _compiles_to(node: Function, code: types.CodeType) -> bool:
    if getattr(node, "name", "<lambda>") != code.co_name:
        return False
    *_, around = ["", *code_path(code)][:-1]
    bare = _bare(node)
    extra: Any = {"type_params": []} if sys.version_info >= (3, 12) else {}
    # A function with its free variables and a class are put around it: so super() and private names mean the same.
    cls: Any = ast.ClassDef(name=around or "_", bases=[], keywords=[], body=[bare], decorator_list=[], **extra)
    free = [ast.arg(arg=name) for name in code.co_freevars if name != "__class__"]
    given = ast.arguments(posonlyargs=[], args=free, kwonlyargs=[], kw_defaults=[], defaults=[])
    outer: Any = ast.FunctionDef(name="_", args=given, body=[cls], decorator_list=[], **extra)
    tree = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    try:
        compiled = compile(tree, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    for name in ("_", around or "_", code.co_name):
        inner = [each for each in nested(compiled) if each.co_name == name]
        if not inner:
            return False
        compiled = inner[-1]
    return _alike(compiled, code)


def code_path(code: types.CodeType) -> list[str]:
    """The names around the code that are classes, and its own; a function between them cuts the path."""
    qualified = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return str(qualified).rpartition("<locals>.")[2].split(".")


def _bare(node: Function) -> ast.stmt:
    """The function without decorators, defaults and annotations: they are no part of its code."""
    if isinstance(node, ast.Lambda):
        return ast.copy_location(ast.Expr(value=ast.Lambda(args=_no_defaults(node.args), body=node.body)), node)
    fields = {name: getattr(node, name) for name in node._fields}
    fields |= {"args": _no_defaults(node.args), "decorator_list": [], "returns": None}
    return ast.copy_location(type(node)(**fields), node)


def _no_defaults(given: ast.arguments) -> ast.arguments:
    def plain(each: ast.arg | None) -> Any:
        return each and ast.copy_location(ast.arg(arg=each.arg), each)

    return ast.arguments(
        posonlyargs=[plain(each) for each in given.posonlyargs],
        args=[plain(each) for each in given.args],
        vararg=plain(given.vararg),
        kwonlyargs=[plain(each) for each in given.kwonlyargs],
        kw_defaults=[None] * len(given.kwonlyargs),
        kwarg=plain(given.kwarg),
        defaults=[],
    )


def _alike(one: types.CodeType, other: types.CodeType) -> bool:
    fields = ("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(one, name) != getattr(other, name) for name in fields) or len(one.co_consts) != len(other.co_consts):
        return False
    for mine, theirs in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(mine, types.CodeType) and isinstance(theirs, types.CodeType):
            if not _alike(mine, theirs):
                return False
        elif type(mine) is not type(theirs) or (mine != theirs and repr(mine) != repr(theirs)):
            return False
    return _operations(one) == _operations(other)


def _operations(code: types.CodeType) -> list[tuple[int, int]]:
    """The steps of *code*, without those that only say how it calls: these depend on the imports of its module."""
    steps = zip(code.co_code[::2], code.co_code[1::2], strict=True)
    return [(step, 0 if step in _JUMPS else argument) for step, argument in steps if step not in _CALLING]


def nested(code: types.CodeType) -> list[types.CodeType]:
    """The code objects of what is defined in *code* itself."""
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """*code* and all code in it."""
    yield code
    for inner in nested(code):
        yield from all_codes(inner)
