"""How large each room is: measures the source without running it.

Blank lines, comments and docstrings are no lines of code, so documentation costs nothing.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def lines_of_code(path: Path) -> int:
    """The number of lines with code in the Python file *path*, or in all files below the folder *path*."""
    return sum(map(_lines, [path] if path.is_file() else sorted(path.rglob("*.py"))))


def _lines(path: Path) -> int:
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def is_private(name: str) -> bool:
    """Whether a part of the dotted *name* is private."""
    return any(re.match(r"_(?!_)", part) for part in name.split("."))
