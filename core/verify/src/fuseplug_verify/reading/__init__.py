"""Reads from the source of a forward what it depends on. Core and kernels use this reader.

>>> from fuseplug_verify.reading import read
>>> reading = read(type(module).forward, module)  # doctest: +SKIP
>>> reading.reads, reading.side_effects, reading.unread  # doctest: +SKIP

No code is run: no function, no property, no ``__getattr__``. What the reader does not know it lists as unread, and it
never guesses: it knows the kinds of statements, expressions and calls of which the forwards of norms, gated MLPs,
experts and rotary functions consist.
"""

from .findings import MISSING, Finding, Looked, Path, Reading
from .hazards import hazard
from .libraries import is_library
from .lookup import attribute
from .naming import constants, names
from .reader import read
from .remembered import remembered

__all__ = [
    "MISSING",
    "Finding",
    "Looked",
    "Path",
    "Reading",
    "attribute",
    "constants",
    "hazard",
    "is_library",
    "names",
    "read",
    "remembered",
]
