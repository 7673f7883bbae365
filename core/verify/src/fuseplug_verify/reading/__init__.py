"""Reads from the source of a forward what it depends on. Core and kernels use this reader.

>>> from fuseplug_verify.reading import read
>>> reading = read(type(module).forward, module)  # doctest: +SKIP
>>> reading.reads, reading.side_effects, reading.unread  # doctest: +SKIP

No code is run: no function, no property, no ``__getattr__``. What cannot be read is listed, never guessed.
"""

from .found import MISSING, Finding, Held, Looked, Path, Reading
from .hazards import hazard
from .libraries import is_library
from .lookup import attribute
from .naming import constants, names
from .reader import read
from .remembered import remembered

__all__ = [
    "MISSING",
    "Finding",
    "Held",
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
