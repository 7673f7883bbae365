"""Reads what a recogniser asks of code: the names and numbers in it, and what it may do besides to compute.

>>> from fuseplug.reading import names
>>> "gate_proj" in names(type(module).forward)  # doctest: +SKIP

No code is run. What cannot be read is listed, never guessed.
"""

from fuseplug_verify import constants, hazard, names, remembered

__all__ = ["constants", "hazard", "names", "remembered"]
