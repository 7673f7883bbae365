"""Finds in code what a recogniser needs to know: names, numbers, and what the code may do other than compute.

>>> from fuseplug.reading import names
>>> "gate_proj" in names(type(module).forward)  # doctest: +SKIP

No code is run. Code that cannot be read is listed, never guessed.
"""

from fuseplug_verify import constants, hazard, names, remembered

__all__ = ["constants", "hazard", "names", "remembered"]
