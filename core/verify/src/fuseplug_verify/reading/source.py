"""Finds the syntax tree of a function: one that compiles to exactly the same code, or none."""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import types
import weakref
from typing import TypeAlias

from ..rebind import all_codes

Function: TypeAlias = ast.FunctionDef | ast.Lambda

_ANNOTATIONS = __future__.annotations.compiler_flag
"""The compiler flag that a notebook passes on from one cell to the next."""

# Equal code comes from equal source. A tree does not refer to its code, so the code can be freed.
_trees: weakref.WeakKeyDictionary[types.CodeType, Function] = weakref.WeakKeyDictionary()


def tree_of(function: types.FunctionType) -> Function | None:
    """Return the tree of *function*, with the lines and columns of its file.

    The file may have changed since it was imported. So a tree is accepted only if the file, compiled as it is now, has
    exactly the code of the function. The result is ``None`` if there is no such tree, or if several lambdas begin on
    its line.
    """
    code = function.__code__
    if code not in _trees:
        linecache.checkcache(code.co_filename)
        lines = linecache.getlines(code.co_filename, function.__globals__)
        tree = _functions("".join(lines), code.co_flags & _ANNOTATIONS).get(code)
        if tree is None:
            return None
        _trees[code] = tree
    return _trees[code]


@functools.lru_cache(maxsize=4)
def _functions(text: str, flags: int) -> dict[types.CodeType, Function]:
    """Return the tree of every function in *text*, by its code, which says in which line the function begins."""
    try:
        tree = ast.parse(text)
        compiled = compile(tree, "", "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    nodes: dict[tuple[str, int], list[Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            nodes.setdefault((node.name, first), []).append(node)
        elif isinstance(node, ast.Lambda):
            nodes.setdefault(("<lambda>", node.lineno), []).append(node)
    named = ((code, nodes.get((code.co_name, code.co_firstlineno), [])) for code in all_codes(compiled))
    return {code: several[0] for code, several in named if len(several) == 1}
