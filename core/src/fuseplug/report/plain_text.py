"""Text of third parties, made safe for a terminal."""

from __future__ import annotations

import re
import sys
import unicodedata

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode that move the cursor, change colours, turn the writing direction, or break lines."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])|\x9b[0-?]*[ -/]*[@-~]")
"""Sequences that terminals obey: CSI and OSC, and those of two characters."""


_IN_ASCII = str.maketrans({"─": "-", "×": "x", "…": "...", "–": "-", "→": "->", "µ": "u"})
"""Substitutes for characters that Fuseplug itself prints, for encodings that lack them."""


def one_line(text: object) -> str:
    """*text* without terminal escapes and control characters, its lines joined by spaces."""
    return " ".join(line for line in (part.strip() for part in _lines(text)) if line)


def some_lines(text: object) -> str:
    """*text* without terminal escapes and control characters, its lines kept."""
    return "\n".join(_lines(text))


def printable(text: str) -> str:
    """*text* as ``print`` can write it, with substitutes for characters that the encoding of stdout lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_IN_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def _lines(text: object) -> list[str]:
    cleaned = _ESCAPES.sub("", str(text)).replace("\r\n", "\n").expandtabs(4)
    return ["".join(char for char in line if unicodedata.category(char) not in _UNSEEN) for line in cleaned.split("\n")]
